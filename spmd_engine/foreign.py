"""Read files of other programs, with limits on size, depth and digits, and errors of one line."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from select import select
from typing import Any

from spmd_engine.errors import SpmdError, UsageError
from spmd_engine.files import open_regular

MOST_BYTES = 1 << 28  #: the most of a file's text; the largest known tokenizer.json has 33 MB
MOST_OF_REQUEST = 1 << 20  #: bytes of a request to a running job, which waits while it reads
DEPTH = 64  #: most levels of nested objects and lists
DIGITS = 100  #: most digits of a whole number
_LARGEST = 10**DIGITS
PATIENCE = 30.0  #: seconds that a reader waits for the first byte of a pipe
LONGEST = 500  #: most characters of a reason
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  #: the JSON escape of a surrogate
#: a TOML key that is nested too deep
_DOTTED = re.compile(rf"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{DEPTH}}}")


@contextmanager
def reading(what: str, hint: str = "", kind: type[SpmdError] = UsageError) -> Iterator[None]:
    """Convert any error of the code inside, which reads a foreign file, to one of this kind: ``WHAT: REASON HINT``.

    Errors of this package pass unchanged. Libraries raise any error on damaged content, even a BaseException.
    """
    try:
        yield
    except (SpmdError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {reason(error)}{hint}") from error


def check_link(path: str | os.PathLike) -> None:
    """Raise UsageError if a path in a folder that is read leads to another folder, which is not read, or nowhere."""
    if os.path.islink(path) and not os.path.isfile(path):
        where = "a folder, which is not read: name that folder itself" if os.path.isdir(path) else "no file: restore it"
        raise UsageError(f"{path} is a link to {where}, or remove the link")


def reason(error: BaseException) -> str:
    """The message of an error in one line of bounded length, with the error's type if the message alone is unclear."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join("".join(character if character.isprintable() else " " for character in str(error)).split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    plain = isinstance(error, (OSError, ValueError)) or type(error) is Exception
    return text if plain and text else ": ".join(filter(None, (type(error).__name__, text)))


def first_few(names: Sequence[str], most: int = 3) -> str:
    """``a, b, c and 2 more``."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


POINTER = b"version https://git-lfs.github.com/spec/"  #: how the text begins that Git LFS has in place of a large file


def refuse_pointer(path: str | Path, kind: type[SpmdError] = UsageError) -> None:
    """Raise an error of this kind if the file is a pointer of Git LFS, instead of one about its content."""
    with open(path, "rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise _pointer_error(path, kind)


def _pointer_error(path: str | Path, kind: type[SpmdError]) -> SpmdError:
    return kind(
        f"{path} is a pointer of Git LFS, not the file itself: run 'git lfs pull' in its folder, or fetch the file by "
        "other means"
    )


def read_bytes(path: str | Path, most: int = MOST_BYTES, *, pipes: bool = False) -> bytes:
    """The content of a file, or with ``pipes`` of a pipe, for which this waits.

    Raises OSError, UsageError for what is no file, and ValueError for more than ``most`` bytes, and for a pipe to which
    no program writes.
    """
    opened = path if pipes else open_regular(path, os.O_RDONLY, follow=True)
    if pipes and stat.S_ISFIFO(os.stat(path).st_mode):
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not select([opened], [], [], PATIENCE)[0]:
            os.close(opened)
            raise ValueError(f"it is a pipe to which no program has written for {PATIENCE:g} s")
        os.set_blocking(opened, True)
    with open(opened, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def read_text(path: str | Path, most: int = MOST_BYTES, *, pipes: bool = True) -> str:
    """The text of a UTF-8 file that a user names; raises the errors of ``read_bytes``, and ValueError for other
    content."""
    return read_bytes(path, most, pipes=pipes).decode("utf-8-sig")


def parse_json(text: str | bytes, pairs: Callable[[list], Any] | None = None) -> Any:
    """The content of a JSON text, within the limits; raises ValueError or RecursionError. ``pairs``: object hook."""
    return bounded(json.loads(text, object_pairs_hook=pairs))


def parse_toml(text: str) -> dict[str, Any]:
    """The content of a TOML text, within the limits; raises ValueError or RecursionError."""
    if _DOTTED.search(text):  # tomllib takes quadratic time for such a key
        raise RecursionError
    return bounded(tomllib.loads(text))


def json_at(
    path: str | Path,
    kind: type[SpmdError] = UsageError,
    *,
    most: int = MOST_BYTES,
    pipes: bool = True,
    pairs: Callable[[list], Any] | None = None,
) -> Any:
    """The content of a JSON file, within the limits; raises errors of this kind, and UsageError, only.

    ``pairs`` is the hook of ``parse_json``.
    """
    with reading(f"{path} cannot be read as JSON", kind=kind):
        text = read_text(path, most, pipes=pipes)
        if text.startswith(POINTER.decode()):
            raise _pointer_error(path, kind)
        content = parse_json(text, pairs)
        if SURROGATE.search(text):  # half of a surrogate pair is no character, but a file's name may have such a byte
            json.dumps(content, ensure_ascii=False).encode(errors="surrogateescape")
        return content


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``pairs`` of ``parse_json`` for formats with unique names; raises ValueError for a name that occurs twice or is
    not printable."""
    content = dict(pairs)
    if unprintable := [name for name in content if not name.isprintable()]:
        raise ValueError(f"{unprintable[0]!r:.60} is not a valid name")
    if len(content) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} occurs twice")
    return content


def bounded(content: Any) -> Any:
    """``content``; raises RecursionError if it is nested too deep, ValueError if a number has too many digits."""
    level = [content]
    for _ in range(DEPTH + 1):
        numbers = [value for value in level if type(value) is int]
        if numbers and max(max(numbers), -min(numbers)) >= _LARGEST:
            raise ValueError(f"a number has more than {DIGITS} digits")
        children = [value.values() if type(value) is dict else value for value in level if type(value) in (dict, list)]
        if not children:
            return content
        level = list(chain.from_iterable(children))
    raise RecursionError
