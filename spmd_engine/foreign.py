"""Files that others wrote: read within bounds on size, depth and digits, and whatever is wrong is one line."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from spmd_engine.errors import SpmdError, UsageError

MOST_BYTES = 1 << 28  #: of a text; the largest known tokenizer.json has 33 MB
DEPTH = 64  #: of objects and lists in each other
DIGITS = 100  #: of a whole number
_LARGEST = 10**DIGITS
LONGEST = 500  #: characters of a reason
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  #: a surrogate, as an escape in JSON
#: A TOML key that is nested too deep.
_DOTTED = re.compile(rf"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{DEPTH}}}")


@contextmanager
def reading(what: str, hint: str = "", kind: type[SpmdError] = UsageError) -> Iterator[None]:
    """Turn any error of what reads a foreign file into one line, ``WHAT: REASON HINT``, of this kind.

    Errors of this package pass as they are. Libraries raise anything on damaged content, and one that panics does not
    even raise an Exception.
    """
    try:
        yield
    except (SpmdError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {reason(error)}{hint}") from error


def reason(error: BaseException) -> str:
    """What an error says, in one line of bounded length; with its type where the text alone says too little."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join("".join(each if each.isprintable() else " " for each in str(error)).split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    plain = isinstance(error, (OSError, ValueError)) or type(error) is Exception
    return text if plain and text else f"{type(error).__name__}: {text}"


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """A file's text, UTF-8; raises OSError or ValueError, also for one of more bytes."""
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content.decode("utf-8-sig")


def parse_json(text: str | bytes, pairs: Callable[[list], Any] | None = None) -> Any:
    """What a JSON text says, within the bounds; raises ValueError or RecursionError. ``pairs`` makes its objects."""
    return _bounded(json.loads(text, object_pairs_hook=pairs))


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML text says, within the bounds; raises ValueError or RecursionError."""
    if _DOTTED.search(text):  # tomllib takes the square of its length for such a key
        raise RecursionError
    return _bounded(tomllib.loads(text))


def json_at(path: str | Path, kind: type[SpmdError] = UsageError) -> Any:
    """What a JSON file says, within the bounds; whatever is wrong with it is an error of this kind."""
    with reading(f"{path} cannot be read as JSON", kind=kind):
        text = read_text(path)
        content = parse_json(text)
        if _SURROGATE.search(text):  # half of a pair is no character, and no terminal prints it
            json.dumps(content, ensure_ascii=False).encode()
        return content


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``pairs`` of ``parse_json`` for formats that name everything once: raises ValueError for a name that is given
    twice, or that would not print in one line."""
    found = dict(pairs)
    if odd := [name for name in found if not name.isprintable()]:
        raise ValueError(f"{odd[0]!r:.60} is no name")
    if len(found) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} is given twice")
    return found


def _bounded(content: Any) -> Any:
    """``content``, unless it is nested too deep, or has a whole number of too many digits."""
    level = [content]
    for _ in range(DEPTH + 1):
        numbers = [each for each in level if type(each) is int]
        if numbers and max(max(numbers), -min(numbers)) >= _LARGEST:
            raise ValueError(f"a number has more than {DIGITS} digits")
        inner = [each.values() if type(each) is dict else each for each in level if type(each) in (dict, list)]
        if not inner:
            return content
        level = list(chain.from_iterable(inner))
    raise RecursionError
