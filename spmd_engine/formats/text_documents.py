"""Documents of text in files and in lines of JSON, read by spans of bytes, so that ranks share the work."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from spmd_engine.errors import UsageError
from spmd_engine.foreign import parse_json, reading

CHUNK = 1 << 20  #: bytes of a large file to read at once
LINES = ".jsonl"  #: files with one document per line, a JSON object; any other file is one document

_UNPACK, _CONVERT = "unpack it first", "convert it to text first"
_IMAGES = "models of images learn from these (--model convnet)"
#: By the first bytes of files that are no text: their format, and what the user can do.
_SIGNATURES = {
    b"PK\3\4": ("a zip archive, as .npz and .docx files are", f"{_UNPACK}; of arrays of images, {_IMAGES}"),
    b"PK\5\6": ("an empty zip archive", "name a file of text"),
    b"\x1f\x8b": ("compressed by gzip", _UNPACK),
    b"BZh91AY&SY": ("compressed by bzip2", _UNPACK),
    b"\xfd7zXZ\0": ("compressed by xz", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", _UNPACK),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    b"\x89PNG\r\n": ("a PNG image", _IMAGES),
    b"\xff\xd8\xff": ("a JPEG image", _IMAGES),
    b"GIF8": ("a GIF image", _IMAGES),
    b"\x93NUMPY": ("a NumPy array", f"of images, {_IMAGES}"),
    b"%PDF-": ("a PDF document", _CONVERT),
    b"PAR1": ("a Parquet table", _CONVERT),
    b"\x89HDF": ("an HDF5 file", _CONVERT),
    b"SQLite format 3\0": ("an SQLite database", _CONVERT),
    b"GGUF": ("a GGUF file, of a model", "name a file of text"),
    b"\x7fELF": ("a program", "name a file of text"),
    b"\xff\xfe": ("text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
}
_SAMPLE = 1 << 12  #: bytes that are checked at the beginning, the middle and the end of a file
_MOST_ODD = 0.3  #: largest fraction of bytes that are no UTF-8: a tenth in Western Latin-1 text, half in packed data
_CONTROLS = bytes({*range(32), 127} - {*b"\t\n\v\f\r\b\x1b"})

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Document:
    """A document: a text, a prompt with its completion, or a conversation."""

    text: str = ""
    prompt: str | None = None  #: precedes the text; its tokens are no targets
    messages: Sequence[Message] | None = None  #: a conversation, instead of text and prompt
    file: str | None = None  #: the name of a large file, instead of a text

    def chunks(self) -> Iterator[bytes]:
        """The text in parts, as UTF-8."""
        if self.file is None:
            yield self.text.encode(errors="surrogateescape")
            return
        with _opened(self.file) as file:
            while chunk := file.read(CHUNK):
                yield chunk


def find_files(paths: Sequence[str]) -> list[tuple[str, int]]:
    """The files at ``paths`` and in folders there, sorted, with their sizes; without hidden and compiled files.

    Raises UsageError for a path that does not exist.
    """
    files = []
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            hidden = any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(path).parts)
            if file.is_file() and not hidden:
                files.append((str(file), file.stat().st_size))
    return files


def count_documents(files: Sequence[tuple[str, int]], begin: int, end: int) -> int:
    """The number of documents that ``documents`` yields for these arguments; parses no lines."""
    return sum(1 if content is None else bool(content.strip()) for _, _, content in _pieces(files, begin, end))


def documents(files: Sequence[tuple[str, int]], begin: int, end: int, large: int) -> Iterator[Document]:
    """The documents whose first byte is in ``begin`` to ``end`` - 1 of the concatenation of all files.

    Consecutive spans yield each document once. A file of more than ``large`` bytes is returned by name. Raises
    UsageError, naming the file and the byte, for a line that is no document, and for a file that is no text.
    """
    for name, at, line in _pieces(files, begin, end):
        if line is None:
            yield _whole_file(name, large)
        elif line.strip():
            yield _document(line, f"{name}, at byte {at}")


def _pieces(files: Sequence[tuple[str, int]], begin: int, end: int) -> Iterator[tuple[str, int, bytes | None]]:
    """File name, first byte and content of each line in the span; a file that is one document has no content."""
    before = 0
    for name, size in files:
        if name.endswith(LINES) and before < end and begin < before + size:
            with _opened(name) as file:
                if begin > before:  # a line that begins before this span belongs to the one before
                    file.seek(begin - before - 1)
                    file.readline()
                at = file.tell()
                while at < end - before and (line := file.readline()):
                    yield name, at, line
                    at += len(line)
        elif not name.endswith(LINES) and begin <= before < end and size:
            yield name, 0, None
        before += size


def check_text(file: BinaryIO, name: str) -> None:
    """Raise UsageError, naming the file, if samples of it are no text; otherwise rewind it."""
    size = file.seek(0, os.SEEK_END)
    samples = []
    for place in dict.fromkeys((0, max(0, size // 2 - _SAMPLE // 2), max(0, size - _SAMPLE))):
        file.seek(place)
        samples.append(file.read(_SAMPLE))
    file.seek(0)
    for signature, (kind, remedy) in _SIGNATURES.items():
        if samples[0].startswith(signature):
            raise UsageError(f"{name} is no text: it is {kind}; {remedy}")
    for sample in samples:
        if _odd_bytes(sample) > _MOST_ODD * len(sample):
            raise UsageError(
                f"{name} is no text: much of it is no UTF-8. Convert it (iconv -f ENCODING -t UTF-8), or leave it out"
            )


def _odd_bytes(sample: bytes) -> int:
    """The number of bytes that are control characters or no UTF-8."""
    controls = len(sample) - len(sample.translate(None, _CONTROLS))
    try:
        sample.decode()
        return controls
    except UnicodeDecodeError:
        text = sample.decode(errors="surrogateescape")
        return controls + sum("\udc80" <= character <= "\udcff" for character in text)


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    try:
        with open(name, "rb") as file:
            yield file
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error}") from error


def _whole_file(name: str, large: int) -> Document:
    with _opened(name) as file:
        check_text(file, name)
        if os.fstat(file.fileno()).st_size > large:
            return Document(file=name)
        return Document(file.read().decode(errors="surrogateescape"))


def _document(line: bytes, where: str) -> Document:
    with reading(f"{where}: this line cannot be read as JSON"):
        content = parse_json(line)
        if rb"\ud" in line.lower():  # perhaps a lone surrogate, which is no character
            text = json.dumps(content, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
            content = parse_json(text.decode("utf-16-le", "replace"))
    if isinstance(content, Mapping):
        text, prompt, completion, messages = map(content.get, ("text", "prompt", "completion", "messages"))
        if isinstance(text, str):
            return Document(text)
        if isinstance(prompt, str) and isinstance(completion, str):
            return Document(completion, prompt)
        if isinstance(messages, list) and messages and all(isinstance(message, Mapping) for message in messages):
            return Document(messages=messages)
    raise UsageError(
        f'{where}: a document is {{"text": ...}}, {{"prompt": ..., "completion": ...}} or {{"messages": [...]}}'
    )
