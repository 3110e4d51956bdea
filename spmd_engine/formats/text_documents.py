"""Documents of text, from files and lines of JSON: a part of them each, so that ranks share the reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.foreign import parse_json, reading

LINES = ".jsonl"  #: files of this ending hold a document a line, as an object; any other file is a document

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Document:
    """One document: a text; or a prompt and what is to be learnt after it; or a conversation."""

    text: str = ""
    prompt: str | None = None  #: comes before the text, and is not learnt
    messages: Sequence[Message] | None = None  #: instead of both


def find_files(paths: Sequence[str]) -> list[tuple[str, int]]:
    """The files that some paths name, and their sizes; of folders all files, but hidden and compiled ones, in order.

    Raises UsageError for a path where nothing is.
    """
    found = []
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            hidden = any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(path).parts)
            if file.is_file() and not hidden:
                found.append((str(file), file.stat().st_size))
    return found


def documents(files: Sequence[tuple[str, int]], begin: int, end: int) -> Iterator[Document]:
    """The documents that begin at these bytes of all files, one behind the other, up to and without ``end``.

    Whoever reads consecutive spans reads every document once. Raises UsageError, naming file and line, for a line
    that describes no document.
    """
    at = 0
    for name, size in files:
        if name.endswith(LINES):
            if at < end and begin < at + size:
                yield from _lines(name, max(0, begin - at), end - at)
        elif begin <= at < end and size:
            yield Document(_read_text(name))
        at += size


def _read_text(name: str) -> str:
    try:
        return Path(name).read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error}") from error


def _lines(name: str, begin: int, end: int) -> Iterator[Document]:
    try:
        with open(name, "rb") as file:
            if begin:  # a line that began before is another's
                file.seek(begin - 1)
                file.readline()
            while (at := file.tell()) < end and (line := file.readline()):
                if line.strip():
                    yield _document(line, f"{name}, at byte {at}")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error}") from error


def _document(line: bytes, where: str) -> Document:
    with reading(f"{where}: this line cannot be read as JSON"):
        content = parse_json(line)
    if isinstance(content, Mapping):
        text, prompt, completion, messages = map(content.get, ("text", "prompt", "completion", "messages"))
        if isinstance(text, str):
            return Document(text)
        if isinstance(prompt, str) and isinstance(completion, str):
            return Document(completion, prompt)
        if isinstance(messages, list) and messages and all(isinstance(each, Mapping) for each in messages):
            return Document(messages=messages)
    raise UsageError(
        f'{where}: a document is {{"text": ...}}, {{"prompt": ..., "completion": ...}} or {{"messages": [...]}}'
    )
