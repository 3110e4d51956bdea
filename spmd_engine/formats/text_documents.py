"""Documents of text in files: whole texts, rows of JSON, tables; by spans of bytes, so that ranks share the work.

The ending of a name, in any case, says what a file's rows are: an object a line, an array of objects, lines of a table.
A file with another ending is one document. ``.gz`` and ``.zst`` may follow any ending. Text is UTF-8, or UTF-16 with a
byte order mark; lines end at ``\\n`` only.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from itertools import count, islice, starmap
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

from spmd_engine.errors import UsageError
from spmd_engine.foreign import MOST_BYTES, SURROGATE, bounded, check_link, distinct, parse_json, reading, reason
from spmd_engine.importing import library

logger = logging.getLogger(__name__)

CHUNK = 1 << 20  #: bytes of a large file to read at once
ALL = 1 << 62  #: more bytes than files have
_SAMPLE = 1 << 12  #: bytes at the beginning of a file that show what it is

Message = Mapping[str, Any]
Rows = Iterator[tuple[int, Any]]  #: the place of each row, and its content
Columns = Mapping[str, str]  #: the names of columns or keys, by what they hold: {"text": "article"}

# Why a row is left out.
EMPTY, NO_ANSWER = "empty", "without an answer"
NO_TEXT = "a number or a list instead of a text"


class Document(NamedTuple):
    """A document: a text, a prompt with its completion, or a conversation."""

    text: str = ""
    source: str = ""  #: the file that it is in
    place: int | None = None  #: its row, by a number or the first byte; None: it is the whole file
    prompt: str | None = None  #: precedes the text; its tokens are no targets
    messages: Sequence[Message] | None = None  #: a conversation, instead of text and prompt
    tools: Sequence[Any] | None = None  #: what the assistant of the conversation may call
    is_instruction: bool = False  #: whether prompt and text are messages of a user and of an assistant
    file: str | None = None  #: the name of a large or compressed file, instead of a text
    left_out: str = ""  #: why there is nothing to learn from it
    notice: str = ""  #: what else of the row is not read
    unread: Sequence[str] = ()  #: in a file's first row, the keys or columns that are not read

    def chunks(self) -> Iterator[bytes]:
        """The text in parts, as UTF-8. Raises UsageError for a file that is no text."""
        if self.file is None:
            yield self.text.encode(errors="surrogateescape")
            return
        decoder = codecs.getincrementaldecoder("utf-8")()
        with _opened(self.file) as file:
            while chunk := file.read(CHUNK):
                decoder.decode(chunk)  # only checked
                _tell_zeros(b"\0" in chunk, self.file)
                yield chunk
            decoder.decode(b"", final=True)

    def content(self) -> str:
        """The whole text."""
        return b"".join(self.chunks()).decode(errors="surrogateescape")

    @property
    def where(self) -> str:
        """Its file and its place there, as errors name them."""
        return _where(self.source, self.place)

    @property
    def is_text(self) -> bool:
        """Whether all of it is learnt."""
        return self.prompt is None and self.messages is None

    @property
    def kind(self) -> str:
        """What it is, in a word."""
        return "text" if self.is_text else "instruction" if self.messages is None else "conversation"

    @property
    def conversation(self) -> Sequence[Message] | None:
        """The messages, also of an instruction."""
        if self.messages is not None or not self.is_instruction:
            return self.messages
        return [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.text}]


def find_files(paths: Sequence[str]) -> list[tuple[str, int]]:
    """The files at ``paths`` and in folders there, sorted, with their sizes; without hidden and compiled files.

    Raises UsageError for a path that does not exist, a link to a folder or to no file, and an empty file of a format
    with a header.
    """
    files = []
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            hidden = any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(path).parts)
            if not hidden:
                check_link(file)
            if file.is_file() and not hidden:
                files.append((str(file), size := file.stat().st_size))
                if not size and (file.suffix.lower() in _UNPACK or format_name(file.name) == PARQUET):
                    raise UsageError(f"{file} is empty, and no {file.suffix} file: fetch it again, or leave it out")
    return files


def documents_among(
    files: Sequence[tuple[str, int]], columns: Columns | None = None, named: Sequence[str] = ()
) -> tuple[list[tuple[str, int]], dict[str, str]]:
    """The files of a folder that have documents, and what each of the others is, by its name.

    Files of another kind, such as images, are left out; so are rows without documents where most files are texts, as
    in a folder of source code. Files that the user has ``named`` are all read. Raises UsageError, naming the first of
    the others, if no file remains, or if it has rows in a folder of rows.
    """
    texts, others = 0, dict[str, tuple[str, UsageError]]()
    for name in (name for name, size in files if size and name not in named):
        try:
            texts += _is_text(name, columns)
        except _OtherKind as error:
            others[name] = error.kind, error
        except UsageError as error:
            if not rows_of(name):
                raise  # a text in another encoding, which can be converted
            others[name] = "no documents in it", error
    rows = [error for name, (_, error) in others.items() if rows_of(name)]
    if len(rows) >= max(1, texts) or any(format_name(name) == PARQUET for name in others):
        raise rows[0]
    kept = [file for file in files if file[0] not in others]
    if others and not any(size for _, size in kept):
        raise next(iter(others.values()))[1]
    return kept, {name: kind for name, (kind, _) in others.items()}


def _is_text(name: str, columns: Columns | None) -> bool:
    """Whether a file is one text; if not, it has rows. Raises UsageError if its beginning shows that it has no
    documents."""
    with _opened(name) as file:
        if rows := rows_of(name):
            for place, content in islice(rows(file, name, columns), 1):
                document_of(name, columns, place, content)
        elif b"\0" in (head := file.peek(_SAMPLE)[:_SAMPLE]) and not _encoding_of(head):
            raise _OtherKind(f"{name} is no text: it has bytes of zero", "with bytes of zero")
    return rows is None


def count_documents(files: Sequence[tuple[str, int]], begin: int, end: int) -> int:
    """The number of documents that ``documents`` yields for these arguments; parses no lines that it can skip."""
    pieces = _pieces(files, begin, end, None, parse=False)
    return sum(1 if rows is None else sum(1 for _ in rows) for _, rows in pieces)


def documents(
    files: Sequence[tuple[str, int]], begin: int, end: int, large: int, columns: Columns | None = None
) -> Iterator[Document]:
    """The documents whose first byte is in ``begin`` to ``end`` - 1 of the concatenation of all files.

    Consecutive spans yield each document once; of a file that has to be read from its beginning, all belong to its
    first byte. A file of more than ``large`` bytes is returned by name. Raises UsageError, naming the file and the row,
    for a row that is no document, and for a file that is no text.
    """
    for name, rows in _pieces(files, begin, end, columns):
        if rows is None:
            yield _whole_file(name, large)
            continue
        read = partial(document_of, name, columns)
        for place, content in islice(rows, 1):
            yield read(place, content)._replace(unread=_unread(content, columns))
        yield from starmap(read, rows)


def prompts_in(path: str, columns: Columns | None = None) -> list[Document]:
    """The prompts of a file: one a line of text, or one a row, a text or a conversation without an answer.

    Raises UsageError for a row without a prompt, and for a file that is no text or too large.
    """
    prompts, size = [], 0
    rows = rows_of(path)
    with _opened(path) as file:
        if rows is None:
            rows = ((number, line.decode().rstrip("\r\n")) for number, line in enumerate(_lines(file, path), 1))
        else:
            rows = rows(file, path, columns)
        for place, content in rows:
            is_text = isinstance(content, str)
            document = Document(content, path, place) if is_text else _prompt(path, columns, place, content)
            if document.text or document.messages:
                prompts.append(document)
            size += len(document.text)
            if size > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return prompts


# --- Files


def format_name(name: str) -> str:
    """The ending that says what a file's rows are, in small letters: ``.jsonl``; ``text`` for one document."""
    return next((ending for ending in _endings(name) if ending in _ROWS), "text")


def rows_of(name: str) -> Callable[[BinaryIO, str, Columns | None], Rows] | None:
    """What reads the rows of a file with this name; None: the file is one document."""
    return _ROWS.get(format_name(name))


def _where(name: str, place: int | None) -> str:
    return name if place is None else f"{name}, {_PLACES[rows_of(name)]} {place}"


def _endings(name: str) -> list[str]:
    """The endings that count: the last one, and the one before it of a compressed file."""
    path = Path(name.lower())
    return [path.suffix, Path(path.stem).suffix] if path.suffix in _UNPACK else [path.suffix]


def _pieces(
    files: Sequence[tuple[str, int]], begin: int, end: int, columns: Columns | None, *, parse: bool = True
) -> Iterator[tuple[str, Rows | None]]:
    """Each file in the span, and its rows there; None for a file that is one document. Unless ``parse``, rows that need
    no parsing have no content."""
    before = 0
    for name, size in files:
        rows, first, last = rows_of(name), begin - before, end - before
        before += size
        if not size or last <= 0 or first >= size:
            continue
        if rows is None:
            if first <= 0:
                yield name, None
        elif rows is _json_lines and _is_plain(name):  # a line that begins before this span belongs to the one before
            yield name, _rows_in(name, rows, columns, (first, last), parse)
        elif first <= 0:
            yield name, _rows_in(name, rows, columns, None, parse)


def _rows_in(name: str, rows: Callable, columns: Columns | None, span: tuple[int, int] | None, parse: bool) -> Rows:
    with _opened(name) as file:
        part = (span or (0, ALL), parse) if rows is _json_lines else ()
        yield from rows(file, name, columns, *part)


def _is_plain(name: str) -> bool:
    """Whether a file has its bytes as they are read, so that a reader may begin anywhere in it."""
    if Path(name.lower()).suffix in _UNPACK:
        return False
    with reading(f"{name} cannot be read"), open(name, "rb") as file:
        return file.read(2) not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _whole_file(name: str, large: int) -> Document:
    if os.stat(name).st_size > large or Path(name.lower()).suffix in _UNPACK:
        return Document(file=name, source=name)
    with _opened(name) as file:
        _tell_zeros(b"\0" in (content := file.read()), name)
        return Document(content.decode(), source=name)


@contextmanager
def _opened(name: str) -> Iterator[Any]:
    """A file without its compression, a text as UTF-8 without a mark. Raises UsageError for what is no text, and for
    any error in the block, which decodes it."""
    path = Path(name)
    with reading(f"{name} cannot be read"), ExitStack() as stack:
        file: Any = stack.enter_context(open(path, "rb"))
        if unpack := _UNPACK.get(path.suffix.lower()):
            file = stack.enter_context(io.BufferedReader(unpack(file), CHUNK))
        head = file.peek(_SAMPLE)[:_SAMPLE]
        if format_name(name) == PARQUET:
            yield file
            return
        mark, encoding = next((item for item in _MARKS.items() if head.startswith(item[0])), (b"", "UTF-8"))
        if encoding == "UTF-16":
            file = io.BufferedReader(_Recoded(file), CHUNK)
            head = file.peek(_SAMPLE)[:_SAMPLE]
        elif encoding == "UTF-8":
            file.read(len(mark))
        else:
            raise _refused(name, encoding)
        _check_head(head[len(mark) if encoding == "UTF-8" else 0 :], name)
        try:
            yield file
        except UnicodeDecodeError as error:
            raise (_no_utf8(name, error) if error.encoding == "utf-8" else error) from None


def _pyarrow(what: str) -> Any:
    return library("pyarrow", f"{what} needs pyarrow", "data")


#: What reads a compressed file, by the ending of its name.
_UNPACK: Mapping[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".zst": lambda file: _pyarrow("a file compressed by zstd").CompressedInputStream(file, "zstd"),
}


class _Recoded(io.RawIOBase):
    """The bytes of a text in UTF-16 with a mark, as UTF-8."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._decoder, self._rest = file, codecs.getincrementaldecoder("utf-16")(), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = self._file.read(CHUNK)
            self._rest = memoryview(self._decoder.decode(chunk, final=not chunk).encode())
            if not chunk:
                break
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


# --- What is no text, and other encodings

_UNPACK_IT, _CONVERT = "unpack it first", "convert it to text first"
_IMAGES = "models of images learn from these (--model convnet)"
#: By the first bytes of files that are no text: their format, and what the user can do.
_SIGNATURES = {
    b"PK\3\4": ("a zip archive, as .npz and .docx files are", f"{_UNPACK_IT}; of arrays of images, {_IMAGES}"),
    b"PK\5\6": ("an empty zip archive", "name a file of text"),
    b"\x1f\x8b": ("compressed by gzip", f"{_UNPACK_IT}, or let its name end in .gz"),
    b"BZh91AY&SY": ("compressed by bzip2", _UNPACK_IT),
    b"\xfd7zXZ\0": ("compressed by xz", _UNPACK_IT),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", f"{_UNPACK_IT}, or let its name end in .zst"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK_IT),
    b"\x89PNG\r\n": ("a PNG image", _IMAGES),
    b"\xff\xd8\xff": ("a JPEG image", _IMAGES),
    b"GIF8": ("a GIF image", _IMAGES),
    b"\x93NUMPY": ("a NumPy array", f"of images, {_IMAGES}"),
    b"%PDF-": ("a PDF document", _CONVERT),
    b"PAR1": ("a Parquet table", "let its name end in .parquet"),
    b"\x89HDF": ("an HDF5 file", _CONVERT),
    b"SQLite format 3\0": ("an SQLite database", _CONVERT),
    b"GGUF": ("a GGUF file, of a model", "name a file of text"),
    b"\x7fELF": ("a program", "name a file of text"),
}
#: Marks at the beginning of a text, with its encoding; that of UTF-16 begins that of UTF-32.
_MARKS = {
    codecs.BOM_UTF8: "UTF-8",
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_MOST_ODD = 0.3  #: largest fraction of odd bytes: a tenth of Western Latin-1 is no UTF-8, and half of packed data
_CONTROLS = bytes({*range(32), 127} - {*b"\t\n\v\f\r\b\x1b"})
#: Characters of texts in the encodings of two bytes: with a wrong order of the bytes, half of a text is others.
_USUAL = re.compile(
    r"[\t\n\r -~\u00a0-\u024f\u0370-\u052f\u2010-\u2026\u3000-\u30ff\u4e00-\u9fff\uac00-\ud7a3\uff00-\uffef]"
)
_COMMON = re.compile(r"[\t\n\r -~\u3000-\u30ff\uff00-\uff65]")  #: those that every text has some of


class _OtherKind(UsageError):
    """A file is no text, whatever its encoding."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def _check_head(head: bytes, name: str) -> None:
    """Raise UsageError if the beginning of a file shows that it is no text; log what its name does not say."""
    for signature, (kind, remedy) in _SIGNATURES.items():
        if head.startswith(signature):
            raise _OtherKind(f"{name} is no text: it is {kind}; {remedy}", kind)
    if len(head) - len(head.translate(None, _CONTROLS)) > _MOST_ODD * len(head):
        raise _refused(name, _encoding_of(head))
    if rows_of(name) is None and head.lstrip()[:1] == b"{":
        first, _, rest = head.partition(b"\n")
        try:
            if isinstance(json.loads(first), dict) and (not rest.strip() or rest.lstrip()[:1] == b"{"):
                _notice(f"{name} has JSON in its lines, and is read as plain text: .jsonl files are documents")
        except (ValueError, RecursionError):
            pass


@lru_cache(1024)
def _notice(text: str) -> None:
    """Log a notice once, however often the file is opened."""
    logger.warning("%s", text)


def _tell_zeros(has_some: bool, name: str) -> None:
    if has_some:
        _notice(f"{name} has bytes of zero, which are read as they are: it may be damaged, or be no text")


def _encoding_of(sample: bytes) -> str | None:
    """The encoding of a text that is no UTF-8, if its bytes show it."""
    for encoding in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
        whole = sample[: len(sample) - len(sample) % 4]
        text = whole.decode(encoding, "replace")
        if len(_USUAL.findall(text)) > 0.95 * len(text) and len(_COMMON.findall(text)) > 0.02 * len(text):
            return encoding
    return None


def _refused(name: str, encoding: str | None) -> UsageError:
    if encoding:
        return UsageError(f"{name} is no text in UTF-8: it is in {encoding}; convert it: iconv -f {encoding} -t UTF-8")
    message = f"{name} is no text: much of it is no UTF-8. Convert it (iconv -f ENCODING -t UTF-8), or leave it out"
    return _OtherKind(message, "much of it no UTF-8")


def _no_utf8(name: str, error: UnicodeDecodeError) -> UsageError:
    """The error for a file with a byte that is no UTF-8, by the bytes around it."""
    content, at = error.object, error.start
    sample = content[at & ~3 : (at & ~3) + _SAMPLE]
    text = sample.decode(errors="surrogateescape")
    odd = sum("\udc80" <= character <= "\udcff" for character in text)
    if odd + sum(map(sample.count, _CONTROLS)) > _MOST_ODD * len(sample) or _encoding_of(sample):
        return _refused(name, _encoding_of(sample))
    good = sum(character > "\x7f" for character in text) - odd
    likely = "Latin-1, Windows-1252, or another encoding of one byte a character"
    remedy = f"; it seems to be {likely}: iconv -f WINDOWS-1252 -t UTF-8" if good < odd else "; it is damaged there"
    return UsageError(
        f"{name} is no text in UTF-8: byte 0x{content[at]:02x} after {content[max(0, at - 20) : at]!r}{remedy}"
    )


# --- Rows


def _lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The lines that are not blank."""
    at = 0
    while line := file.readline(MOST_BYTES + 1):
        _check_length(line, name, at)
        at += len(line)
        if not line.isspace():
            yield line


def _check_length(line: bytes, name: str, at: int) -> None:
    if len(line) > MOST_BYTES:
        raise UsageError(f"{name}, at byte {at}: a line of more than {MOST_BYTES:,} bytes")


def _json_lines(
    file: Any, name: str, columns: Columns | None, span: tuple[int, int] = (0, ALL), parse: bool = True
) -> Rows:
    """An object a line, of the lines that begin in the span; their places are their first bytes."""
    place, mark = 0, file.tell() if file.seekable() else 0  # a mark, which has been read, belongs to the first line
    if span[0] > 0:
        place = file.seek(span[0] - 1)
        place, mark = place + len(file.readline()), 0
    while place < span[1] and (block := file.read(max(1, min(CHUNK, span[1] - place - mark)))):
        if block[-1] != ord("\n"):
            block += (rest := file.readline(MOST_BYTES + 1))
            _check_length(rest, name, place)
        if not parse:
            yield from ((place, None) for line in block.split(b"\n") if line and not line.isspace())
            place, mark = place + mark + len(block), 0
            continue
        text = block.decode()
        is_ascii, begin = len(text) == len(block), 0
        may_be_odd = _may_be_odd(text, columns, text.count("\n") + (text[-1] != "\n"))
        while begin < len(text):
            stop = text.find("\n", begin)
            stop = len(text) if stop < 0 else stop
            try:
                content, end = _scan_once(text, begin)
            except (StopIteration, ValueError, RecursionError):
                content, end = None, -1
            if (end == stop or text[end:stop] == "\r") and not may_be_odd:
                yield place, content
            elif not (line := text[begin:stop]).isspace() and line:
                yield place, _parsed(line, _where(name, place))
            place += mark + 1 + (stop - begin if is_ascii else len(text[begin:stop].encode()))
            begin, mark = stop + 1, 0


def _parsed(line: str, where: str) -> Any:
    try:
        return _mended(json.loads(line, object_pairs_hook=distinct), line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: this line cannot be read as JSON: {reason(error)}") from error


def _may_be_odd(text: str, columns: Columns | None, rows: int, begin: int = 0, end: int | None = None) -> bool:
    """Whether so many rows in a part of a text may have half of a surrogate pair, which is no character, or twice a key
    that is read."""
    if text.find("\\", begin, end) >= 0 and SURROGATE.search(text, begin, ALL if end is None else end):
        return True
    with suppress(StopIteration, ValueError):
        first, _ = _scan_once(text, text.find("{", begin))
        known = set(columns.values()) if columns else _KNOWN
        return any(text.count(f'"{name}":', begin, end) > rows for name in first if name in known)
    return False


def _mended(content: Any, text: str) -> Any:
    """What a text in JSON has, with a sign for each half of a surrogate pair."""
    if not SURROGATE.search(text):
        return content
    pairs = json.dumps(content, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
    return json.loads(pairs.decode("utf-16-le", "replace"))


_SPACES, _COMMA = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n]*,[ \t\r\n]*")
_scan = json.JSONDecoder(object_pairs_hook=distinct).raw_decode
_scan_once = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def _json_values(file: Any, name: str, columns: Columns | None) -> Rows:
    """The elements of an array, or objects one after the other. A single object without any of the usual keys, as a
    program's settings are, is a text."""
    decoder, held, at, ended, in_array, number = codecs.getincrementaldecoder("utf-8")(), "", 0, False, False, 0
    began = closed = is_odd = False
    while True:
        at = _SPACES.match(held, at).end()  # type: ignore[union-attr]
        if number and not closed and not is_odd:
            items, after = _items_in(held, at, in_array)
            if not (is_odd := _may_be_odd(held, columns, len(items), at, after)):
                yield from zip(count(number + 1), items, strict=False)
                number, held, at = number + len(items), held[after:], 0  # an error counts the lines before it
        if not began and held[at:]:
            began, in_array = True, held[at] == "["
            at += in_array
            continue
        if in_array and not number and held[at : at + 1] == "]":
            closed, at = True, at + 1
            continue
        try:
            if closed and held[at:]:
                raise UsageError(f"{name}: text after the end of its array")
            value, end = _scan(held, at)
            value = _mended(value, held[at:end])
            end = _SPACES.match(held, end).end()  # type: ignore[union-attr]
            if in_array and held[end : end + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' delimiter", held, end)
        except json.JSONDecodeError as error:
            incomplete = error.pos > len(held) - 64 or error.msg.startswith("Unterminated string")
            if ended and not held[at:] and (closed or not in_array):
                return
            where = _where(name, number + 1)
            if ended or not incomplete:
                raise UsageError(f"{where}: it cannot be read as JSON: {error.msg}") from None
            chunk = file.read(max(CHUNK, len(held) - at))
            held, at, ended = held[at:] + decoder.decode(chunk, final=not chunk), 0, not chunk
            is_odd = False
            if len(held) > MOST_BYTES:
                raise UsageError(f"{where}: it has more than {MOST_BYTES:,} bytes") from None
            continue
        if not in_array and not number and not columns and not _fits(value) and not file.peek(1) and not held[end:]:
            value = _as_text(value, held, name)
        number += 1
        closed = in_array and held[end] == "]"
        at = end + in_array
        yield number, value


def _items_in(held: str, at: int, in_array: bool) -> tuple[list[Any], int]:
    """The values from ``at`` on, as far as what follows them shows that they are complete, and where the next begins.

    The elements of an array up to the last place that looks like one between them are parsed at once: if that place is
    inside of an element, the text up to it has open brackets or quotes, and its values are parsed one by one.
    """
    items: list[Any] = []
    between = _COMMA if in_array else _SPACES
    with suppress(StopIteration, ValueError):
        while True:
            value, end = _scan_once(held, at)
            following = between.match(held, end)
            if following is None or not (in_array or type(value) is dict):
                break
            items.append(value)
            at = following.end()
            last = held.rfind(held[end - 1 : held.find(":", at)], at) + 1 if in_array and len(items) == 1 else 0
            if last:
                with suppress(StopIteration, ValueError):
                    more, _ = _scan_once(f"[{held[at:last]}]", 0)
                    return [*items, *more], between.match(held, last).end()  # type: ignore[union-attr]
    return items, at


#: Keys under which data sets have their rows.
_LISTS = ("data", "dataset", "documents", "examples", "instances", "items", "records", "rows", "train")


def _as_text(value: Any, text: str, name: str) -> Any:
    """The text of a JSON file without documents; raises UsageError if they are in a list in it."""
    if isinstance(value, Mapping):
        for key, rows in value.items():
            if isinstance(rows, list) and rows and (_fits(rows[0]) or (key in _LISTS and isinstance(rows[0], Mapping))):
                raise UsageError(f"{name}: its documents are the list {key!r}; write that list alone to a file")
    _notice(f"{name} has no documents, and is read as plain text")
    return {"text": text}


def _table(file: Any, name: str, columns: Columns | None) -> Rows:
    """The lines of a table, whose first line names the columns. Commas, semicolons or tabs separate them."""
    head = file.peek(_SAMPLE)[:_SAMPLE].partition(b"\n")[0]
    separator = "\t" if ".tsv" in _endings(name) else max(",;\t|", key=lambda mark: head.count(mark.encode()))
    csv.field_size_limit(MOST_BYTES)
    content = io.TextIOWrapper(file, "utf-8", newline="\n")
    lines = csv.reader(content, delimiter=separator, strict=True)
    names: list[str] = []
    text, last = None, 0
    try:
        for row in lines:
            last = lines.line_num
            if not row:
                continue
            if not names:
                names = [name.strip() for name in row]
                twice = {name for name in names if name and names.count(name) > 1}
                if known := twice & (set(columns.values()) if columns else _KNOWN):
                    raise UsageError(f"{name}: its first line names {known.pop()!r} twice")
                continue
            if len(row) != len(names):
                where = _where(name, lines.line_num)
                raise UsageError(f"{where}: {len(row)} columns, but the first line names {len(names)}")
            _tell_zeros("\0" in (row[text] if text is not None else "".join(row)), name)
            if text is None:
                yield lines.line_num, dict(zip(names, row, strict=True))
                text = _only_text(names, columns)
            else:
                yield lines.line_num, row[text]
    except csv.Error as error:
        raise UsageError(f"{_where(name, last + 1)}: {error}; is a quote missing in this row?") from None
    finally:
        content.detach()


def _parquet(file: Any, name: str, columns: Columns | None) -> Rows:
    """The rows of a Parquet table; reads only the columns that may be needed, and names the others in the first row."""
    _pyarrow(f"{name}: a Parquet table")
    from pyarrow import parquet

    table = parquet.ParquetFile(
        file, pre_buffer=False, buffer_size=CHUNK, page_checksum_verification=True
    )  # else it reads all of the file
    there = table.schema_arrow.names
    wanted = [column for column in there if column in (set(columns.values()) if columns else _KNOWN)]
    if not wanted and table.metadata.num_rows:
        raise UsageError(f"{name}: {_no_document(there)}")
    number, text = 0, _only_text(wanted, columns)
    for group in range(table.num_row_groups):
        for batch in table.iter_batches(1024, row_groups=[group], columns=wanted, use_threads=False):
            names, contents = batch.schema.names, [*map(_values, batch.columns)]
            if text is None or not number:
                rows: list[Any] = [dict(zip(names, values, strict=True)) for values in zip(*contents, strict=True)]
                rows[:1] = [row if number else dict.fromkeys(there) | row for row in rows[:1]]
            else:
                rows = [value if type(value) is str else {names[text]: value} for value in contents[text]]
            yield from zip(count(number + 1), rows, strict=False)
            number += len(rows)


def _only_text(names: Sequence[str], columns: Columns | None) -> int | None:
    """The number of the column of texts, if no other is read: after the first row, its values stand for rows."""
    read = columns or {role: name for name in names for role, usual in USUAL.items() if name in usual}
    return names.index(read["text"]) if read.keys() == {"text"} and names.count(read["text"]) == 1 else None


def _values(column: Any) -> list[Any]:
    """The values of a column; texts without a scalar of pyarrow for each."""
    is_text = str(column.type) in ("string", "large_string")
    return column.to_numpy(zero_copy_only=False).tolist() if is_text else column.to_pylist()


PARQUET = ".parquet"
_ROWS: Mapping[str, Callable[..., Rows]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), _json_lines),
    ".json": _json_values,
    **dict.fromkeys((".csv", ".tsv"), _table),
    PARQUET: _parquet,
}
#: What the places of rows are, by what reads them.
_PLACES = {_json_lines: "at byte", _json_values: "item", _table: "line", _parquet: "row", None: "line"}


# --- The document in a row

#: The usual names of columns and keys, by what they hold; the first that is there counts.
USUAL = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "question"),
    "completion": ("completion", "response", "answer"),
    "instruction": ("instruction",),
    "input": ("input", "context"),
    "output": ("output", "response"),
    "text": ("text", "content"),
    "tools": ("tools",),
}
_KNOWN = {name for names in USUAL.values() for name in names}
_TEXTS = ("text", "completion", "output")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}


def parse_columns(text: str | None) -> dict[str, str] | None:
    """``text=article`` or ``prompt=question,completion=answer``, by what the columns hold. Raises UsageError."""
    if text is None:
        return None
    pairs = [pair.partition("=") for pair in text.split(",")]
    if any(role not in USUAL or not name for role, _, name in pairs):
        raise UsageError(f"--columns {text}: give WHAT=NAME, and commas between; WHAT is one of {', '.join(USUAL)}")
    return {role: name for role, _, name in pairs}


def document_of(source: str, columns: Columns | None, place: int, content: Any) -> Document:
    """The document in a row of ``source``. Raises UsageError, naming the place, for a row that is none."""
    if type(content) is str:
        if content:
            return _new(Document, (content, source, place, None, None, None, False, None, "", "", ()))
    elif type(content) is dict and not columns:  # most rows: what else they have is not looked at
        name, before, chat = _alone_among(tuple(content))
        if name:
            text, prompt = content[name], content[before] if before else None
            if text and type(text) is str and (not before or (prompt and type(prompt) is str)):
                return _new(Document, (text, source, place, prompt, None, None, False, None, "", "", ()))
        elif chat and _are_plain(messages := content[chat]):
            return _new(Document, ("", source, place, None, messages, None, False, None, "", "", ()))
    with _at(source, place):
        return _document(source, columns, place, content)


_new = tuple.__new__  #: which makes a named tuple in half the time


@contextmanager
def _at(source: str, place: int) -> Iterator[None]:
    """Name the place of a row in the error about it."""
    try:
        yield
    except (UsageError, RecursionError, ValueError) as error:
        text = str(error) if isinstance(error, UsageError) else reason(error)
        raise UsageError(f"{_where(source, place)}: {text}") from error


def _document(source: str, columns: Columns | None, place: int, content: Any) -> Document:
    fields = {"text": content} if isinstance(content, str) else _fields(content, columns)
    kinds = _kinds(fields)
    if not kinds:
        if not any(name in fields for name in ("text", "messages", "completion", "output")):
            raise UsageError(_no_document(content))
        return Document("", source, place, left_out=NO_TEXT if any(map(fields.get, _TEXTS)) else EMPTY)
    kind = kinds[0]
    others = [*kinds[1:], *(["input"] if fields.get("input") and kind != "instruction" else [])]
    notice = f"{others[0]} beside {kind}, not read" if others else ""
    if kind == "instruction" and not isinstance(fields.get("input") or "", str):
        notice = "input that is no text, not read"
    if kind == "text":
        return Document(fields["text"], source, place, notice=notice)
    if kind == "messages" or isinstance(fields.get("prompt"), list):
        listed = fields["messages"] if kind == "messages" else [*fields["prompt"], *fields["completion"]]
        messages = [_message(message) for message in listed]
        left_out = "" if any(message["role"] == "assistant" for message in messages) else NO_ANSWER
        tools = _listed(fields.get("tools")) or None
        return Document("", source, place, None, messages, tools, left_out=left_out, notice=notice)
    is_instruction = kind == "instruction"
    request, answer = (
        (_instruction(fields), fields["output"]) if is_instruction else (fields["prompt"], fields["completion"])
    )
    return Document(
        answer, source, place, request, None, None, is_instruction, None, "" if answer else NO_ANSWER, notice
    )


def _prompt(source: str, columns: Columns | None, place: int, content: Any) -> Document:
    """What precedes an answer in a row."""
    with _at(source, place):
        fields = _fields(content, columns)
        messages = fields.get("messages") or fields.get("prompt")
        if _is_conversation(messages):
            tools = _listed(fields.get("tools")) or None
            return Document("", source, place, messages=[_message(message) for message in messages], tools=tools)
        texts = (fields[name] for name in ("prompt", "instruction", "text") if isinstance(fields.get(name), str))
        if (text := next(texts, None)) is None:
            keys = f"; it has {', '.join(map(str, content))}" if isinstance(content, Mapping) else ""
            raise UsageError(f'it must be {{"prompt": TEXT}} or {{"messages": [{{"role": ...}}]}}{keys:.200}')
        return Document(_instruction(fields) if text == fields.get("instruction") else text, source, place)


def _fields(content: Any, columns: Columns | None) -> dict[str, Any]:
    """The values of a row, by what they hold."""
    if not _is_mapping(content):
        return {}
    bounded(content)
    fields: dict[str, Any] = {}
    if columns:
        if missing := [name for name in columns.values() if name not in content]:
            raise UsageError(f"no {missing[0]!r} there; it has {', '.join(map(str, content)):.200}")
        fields = {role: content[name] for role, name in columns.items()}
    else:
        for role, names in _usual_among(tuple(content)):
            for name in names:
                fields[role] = content[name]
                if content[name] is not None:
                    break
    if isinstance(fields.get("messages"), str):
        fields["messages"] = _listed(fields["messages"])
    return fields


@lru_cache(256)
def _usual_among(names: tuple[str, ...]) -> Sequence[tuple[str, Sequence[str]]]:
    """The usual names that a row has, by what they hold: most rows of a file have the same ones."""
    there = [(role, [name for name in usual if name in names]) for role, usual in USUAL.items()]
    return [(role, present) for role, present in there if present]


@lru_cache(256)
def _alone_among(names: tuple[str, ...]) -> tuple[str, str, str]:
    """The names of a text or completion, of its prompt, and of messages, if a row with these names can be nothing else;
    else ""."""
    there = {role: present[0] for role, present in _usual_among(names)}
    known = sum(name in _KNOWN for name in names)
    if there.keys() - {"output"} == {"prompt", "completion"} and known == 2:
        return there["completion"], there["prompt"], ""
    text, messages = (there[role] if there.keys() == {role} and known == 1 else "" for role in ("text", "messages"))
    return text, "", messages


def _are_plain(messages: Any) -> bool:
    """Whether messages, one of the assistant among them, are as templates expect them."""
    is_answered = False
    if type(messages) is list:
        for message in messages:
            if type(message) is not dict or len(message) != 2 or type(message.get("content")) is not str:
                return False
            role = message.get("role")
            if role == "assistant":
                is_answered = True
            elif type(role) is not str:
                return False
    return is_answered


def _is_mapping(value: Any) -> TypeGuard[Mapping]:
    return type(value) is dict or isinstance(value, Mapping)  # which takes longer than to read a short row


def _kinds(fields: Mapping[str, Any]) -> list[str]:
    """What a row is, first what is taken; nothing if it has no content."""
    messages, prompt, completion = (fields.get(name) for name in ("messages", "prompt", "completion"))
    kinds = []
    if _is_conversation(messages):
        kinds.append("messages")
    both = isinstance(prompt, str) and isinstance(completion, str)
    if (both and (prompt or completion)) or (isinstance(prompt, list) and isinstance(completion, list) and completion):
        kinds.append("prompt")
    elif isinstance(fields.get("instruction"), str) and isinstance(fields.get("output"), str):
        kinds.append("instruction")
    if isinstance(fields.get("text"), str) and fields["text"]:
        kinds.append("text")
    return kinds


def _is_conversation(value: Any) -> TypeGuard[list[Message]]:
    return isinstance(value, list) and bool(value) and all(map(_is_mapping, value))


def _unread(content: Any, columns: Columns | None) -> Sequence[str]:
    known = set(columns.values()) if columns else _KNOWN
    return tuple(str(name) for name in content if name not in known) if isinstance(content, Mapping) else ()


def _fits(content: Any) -> bool:
    """Whether a row has what a document has."""
    fields = _fields(content, None)
    return bool(_kinds(fields)) or "text" in fields


def _instruction(fields: Mapping[str, Any]) -> str:
    """An instruction, and what it is about."""
    about = fields.get("input")
    return f"{fields['instruction']}\n\n{about}" if isinstance(about, str) and about.strip() else fields["instruction"]


def _message(message: Any) -> Message:
    """A message as templates expect it: with role and content, its parts of text joined, without empty keys."""
    if not isinstance(message, Mapping):
        raise UsageError(f'a message is {{"role": ..., "content": ...}}; one there is {message!r:.40}')
    if type(message.get("role")) is str and type(message.get("content")) is str and None not in message.values():
        return message
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "role" not in message and isinstance(message.get("from"), str):
        role = message.pop("from")
        message = {"role": _ROLES.get(role, role), "content": message.pop("value", ""), **message}
    if not isinstance(message.get("role"), str):
        raise UsageError('a message is {"role": ..., "content": ...}; one there has no role')
    if isinstance(content := message.get("content"), list):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        for part in parts:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise UsageError(f"a message has a part {kind!r:.60}; models of text read only text")
        message["content"] = "".join(part["text"] for part in parts)
    return message


def _listed(value: Any) -> Any:
    """A list, which tables have as JSON."""
    if not isinstance(value, str) or not value.strip():
        return value
    with reading(f"{value!r:.40} cannot be read as JSON"):
        return parse_json(value)


def _no_document(content: Any) -> str:
    names = [str(name) for name in content] if isinstance(content, (Mapping, list)) else []
    listed = f"{', '.join(names):.200}"
    there = f"; it has {listed}: name what to read by --columns text=NAME, or leave the file out" if names else ""
    return (
        'a document is {"text": ...}, {"prompt": ..., "completion": ...}, {"instruction": ..., "output": ...} or '
        f'{{"messages": [...]}}{there}'
    )
