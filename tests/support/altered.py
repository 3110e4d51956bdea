"""Random alterations of files, for the tests of damaged files."""

import json
import re

DEEP = "[" * 100_000 + "]" * 100_000
#: Replacements of a number, a name or a text.
WORDS = ["-1", "0", "2.5", "1e999", "nan", "true", "null", "9" * 400, "[]", "{}", "[[[[1]]]]", '"x"', '"', DEEP]
WORDS += ['{"a":' * 70 + "1" + "}" * 70, "a." * 5000 + "a", "(" * 300, "\N{SNOWMAN}", "\udcff"]


def in_words(content, rng):
    """The bytes of a text in which one word is replaced or swapped with another."""
    text = content.decode(errors="surrogateescape")
    places = [match.span() for match in re.finditer(r'"[^"\n]*"|[\w.+-]+', text)]
    begin, end = rng.choice(places)
    other = text[slice(*rng.choice(places))]
    return (text[:begin] + rng.choice([*WORDS, other]) + text[end:]).encode(errors="surrogateescape")


def in_bytes(content, rng):
    """The bytes of a file, altered."""
    at, other = rng.randrange(len(content)), rng.randrange(len(content))
    how = rng.choice(["bit", "cut", "longer", "zeroed", "swapped", "noise", "length"])
    if how == "bit":
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if how == "cut":
        return content[:at]
    if how == "longer":
        return content + rng.randbytes(rng.randrange(1, 99))
    if how == "zeroed":
        end = min(len(content), at + rng.randrange(1, 4096))
        return content[:at] + bytes(end - at) + content[end:]
    if how == "noise":
        return content[:at] + rng.randbytes(min(64, len(content) - at)) + content[at + 64 :]
    if how == "length":
        return rng.choice([0, 1, 1 << 31, (1 << 64) - 1, rng.getrandbits(64)]).to_bytes(8, "little") + content[8:]
    size = min(64, len(content) - max(at, other), abs(at - other))
    first, second = sorted((at, other))
    return (
        content[:first]
        + content[second : second + size]
        + content[first + size : second]
        + content[first : first + size]
        + content[second + size :]
    )


VALUES = [None, True, -1, 0, 1, 1 << 40, 1 << 70, 10**400, 0.5, 1e308, float("nan"), "", "x", "../../etc/passwd"]
VALUES += ["model-00001.safetensors", "F64", "I8", "BF16", "\ud800", "0" * 64, "a" * 5000]
VALUES += [[], {}, [0], ["x"], [1 << 61, 4], [[[[]]]], {"a": 1}, json.loads("[" * 200 + "]" * 200)]


def in_json(content, rng):
    """A JSON value in which one part is replaced, removed, repeated, or swapped with its neighbour."""
    content = json.loads(json.dumps(content))
    place, way = content, []
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return content
        key = rng.choice(keys)
        way.append(key)
        if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.85:
            place = place[key]
            continue
        how = rng.choice(["value", "value", "remove", "swap", "rename"])
        other = rng.choice(keys)
        if how == "remove":
            del place[key]
        elif how == "swap":
            place[key], place[other] = place[other], place[key]
        elif how == "rename" and isinstance(place, dict):
            place[rng.choice(["", "x", "norm/scale", "\ud800", "../x"])] = place.pop(key)
        else:
            place[key] = rng.choice([*VALUES, place[other]])
        return content


def gguf_of(facts):
    """A GGUF file with this metadata and without tensors."""

    def text(value):
        return len(value.encode()).to_bytes(8, "little") + value.encode()

    def fact(value):
        if isinstance(value, str):
            return 8, text(value)
        if isinstance(value, int):
            return 4, value.to_bytes(4, "little")
        each = [fact(one) for one in value]
        content = len(value).to_bytes(8, "little") + b"".join(one for _, one in each)
        return 9, each[0][0].to_bytes(4, "little") + content

    head = b"GGUF\3\0\0\0" + bytes(8) + len(facts).to_bytes(8, "little")
    told = [(text(name), *fact(value)) for name, value in facts.items()]
    return head + b"".join(name + kind.to_bytes(4, "little") + content for name, kind, content in told)
