"""Reading files of other programs, with limits on size, depth and digits, and errors in one line."""

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
    """Turn any error of code that reads a foreign file into one of this kind, in one line: ``WHAT: REASON HINT``.

    Errors of this package pass unchanged. Libraries raise any error on damaged content, even a BaseException.
    """
    try:
        yield
    except (SpmdError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {reason(error)}{hint}") from error


def reason(error: BaseException) -> str:
    """The message of an error, in one line of bounded length; with its type if the message alone is unclear."""
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
    """The content of a JSON text; raises ValueError or RecursionError. ``pairs`` makes its objects."""
    return _bounded(json.loads(text, object_pairs_hook=pairs))


def parse_toml(text: str) -> dict[str, Any]:
    """The content of a TOML text, within the limits; raises ValueError or RecursionError."""
    if _DOTTED.search(text):  # tomllib takes quadratic time for such a key
        raise RecursionError
    return _bounded(tomllib.loads(text))


def json_at(path: str | Path, kind: type[SpmdError] = UsageError) -> Any:
    """The content of a JSON file, within the limits; any error is of this kind."""
    with reading(f"{path} cannot be read as JSON", kind=kind):
        text = read_text(path)
        content = parse_json(text)
        if _SURROGATE.search(text):  # half of a pair is no character, and no terminal prints it
            json.dumps(content, ensure_ascii=False).encode()
        return content


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``pairs`` of ``parse_json`` for formats with unique names: raises ValueError for a name that is given twice or
    is not printable."""
    content = dict(pairs)
    if odd := [name for name in content if not name.isprintable()]:
        raise ValueError(f"{odd[0]!r:.60} is no name")
    if len(content) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} is given twice")
    return content


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
