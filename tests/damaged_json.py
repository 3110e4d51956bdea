"""Damaged JSON files: every value of one replaced or left out, and texts that are cut short or have other bytes."""

import copy
import json
import random

#: What a value may be in the place of another.
ODD = (None, True, "", "x", 0, -1, 1, 2.5, 1e308, 10**30, [], [1], ["x"], {}, {"x": 1})


def places(content, path=()):
    """The paths of all values in it."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def with_other_values(content, seed, count):
    """So many copies, in each of which one value is another, or is missing."""
    dice, paths = random.Random(seed), list(places(content))
    for _ in range(count):
        changed = copy.deepcopy(content)
        *path, last = dice.choice(paths)
        inside = changed
        for key in path:
            inside = inside[key]
        if isinstance(inside, dict) and dice.random() < 0.1:
            del inside[last]
        else:
            inside[last] = copy.deepcopy(dice.choice(ODD))
        yield changed


def with_other_bytes(content, seed, count):
    """So many texts of it that are cut short, or have some bytes changed."""
    dice, text = random.Random(seed), json.dumps(content).encode()
    for _ in range(count):
        spoilt = bytearray(text)
        if dice.random() < 0.3:
            del spoilt[dice.randrange(len(spoilt)) :]
        else:
            for _ in range(dice.choice((1, 1, 3, 30))):
                spoilt[dice.randrange(len(spoilt))] = dice.randrange(256)
        yield bytes(spoilt)
