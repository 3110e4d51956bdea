"""GGUF files, as llama.cpp writes them: facts by name, and tensors, plain or packed in blocks.

After https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import DEPTH, distinct, reading
from spmd_engine.formats.gguf_blocks import BY_NAME, KINDS
from spmd_engine.formats.tensor import FileTensor, Index, PlainTensor

_MAGIC = b"GGUF"
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")  # of a model in several files
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_TRUTH, _TEXT, _LIST = 7, 8, 9
_PLAIN = {0: ("F32", "float32"), 1: ("F16", "float16"), 28: ("F64", "float64"), 30: ("BF16", "bfloat16")}
_CUT = "it ends within its header: it is truncated"
MOST_DIMS = 4
ELEMENTS = 1 << 22  #: unpacked at a time


@dataclass(frozen=True)
class GGUF:
    """What a file says of itself, and its tensors."""

    facts: dict[str, Any]
    tensors: dict[str, FileTensor]


@dataclass(frozen=True)
class BlockedTensor(FileTensor):
    """One in blocks of neighbours of its last dim, each with a scale and a few bits a number."""

    def read(self, split: Sequence[Sequence[int]], index: Index) -> np.ndarray:
        outer = [size for sizes in split[:-1] for size in sizes]
        row = self.shape[-1] // BY_NAME[self.dtype].numbers * BY_NAME[self.dtype].nbytes
        raw = np.memmap(self.path, np.uint8, "r", self.offset, (*outer, row))[tuple(index[: len(outer)])]
        inner = tuple(index[len(outer) :])
        rows = raw.reshape(-1, row)
        probe = np.empty(split[-1], bool)[inner]
        out = np.empty((len(rows), *probe.shape), np.float32)
        step = max(1, ELEMENTS // self.shape[-1])
        for first in range(0, len(rows), step):  # whole rows, but few of them at a time
            some = self._unpacked(rows[first : first + step])
            out[first : first + step] = some.reshape(-1, *split[-1])[(slice(None), *inner)]
        return out.reshape(*raw.shape[:-1], *probe.shape)

    def _unpacked(self, rows: np.ndarray) -> np.ndarray:
        """float32[n last] of rows[n bytes]."""
        kind = BY_NAME[self.dtype]
        with np.errstate(invalid="ignore", over="ignore"):  # who reads it refuses what is not finite
            return kind.unpack(rows.reshape(-1, kind.nbytes)).reshape(len(rows), -1)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // BY_NAME[self.dtype].numbers * BY_NAME[self.dtype].nbytes


def is_gguf(path: str | Path) -> bool:
    """Whether there is a file that begins as these do."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_gguf(path: str | Path) -> GGUF:
    """The facts and the tensors of a file, of which no number is read. Dims come outermost first, as elsewhere.

    Of a model in several files any of them may be given; the first has the facts. Raises CheckpointError, naming the
    tensor, for a file that is missing, is none, is cut short, or has tensors of types that are not known here, or that
    do not lie side by side in the header's order.
    """
    path = Path(path)
    file = _read_file(path)
    count = file.facts.get("split.count", 1)
    return file if count in (0, 1) else _joined([_read_file(each) for each in _parts(path, count)], path)


def _parts(path: Path, count: int) -> list[Path]:
    """The files of a model in so many, of which this is one."""
    found = _PART.fullmatch(path.name)
    if found is None or int(found[2]) != count:
        raise CheckpointError(f"{path} is one of {count} files of a model; call them NAME-00001-of-00003.gguf, ...")
    parts = [path.with_name(f"{found[1]}-{number:05}-of-{found[2]}.gguf") for number in range(1, count + 1)]
    for each in parts:
        if not each.is_file():
            raise CheckpointError(f"{path} is one of {count} files of a model, of which {each.name} is not there")
    return parts


def _joined(parts: Sequence[GGUF], path: Path) -> GGUF:
    for number, part in enumerate(parts):
        if (part.facts.get("split.no"), part.facts.get("split.count")) != (number, len(parts)):
            raise CheckpointError(f"{path}: file {number + 1} of {len(parts)} says that it is another one")
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    count = parts[0].facts.get("split.tensors.count", len(tensors))
    if not len(tensors) == count == sum(len(part.tensors) for part in parts):
        raise CheckpointError(f"{path}: its files have {len(tensors)} tensors of {count}; fetch them again")
    return GGUF(parts[0].facts, tensors)


def _read_file(path: Path) -> GGUF:
    with (
        reading(f"{path} cannot be read as a GGUF file", ". Fetch it again", CheckpointError),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return _read(path, _Cursor(content))


def _read(path: Path, cursor: _Cursor) -> GGUF:
    if cursor.take(4) != _MAGIC:
        raise CheckpointError(f"{path} is no GGUF file; fetch it again")
    if (version := cursor.number("I")) not in (2, 3):
        raise CheckpointError(f"{path} is of version {version} of the format; 2 and 3 are read")
    count, facts_count = cursor.number("Q"), cursor.number("Q")
    facts = distinct([(cursor.text(), cursor.value(cursor.number("I"))) for _ in range(facts_count)])
    described: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name, dims = cursor.text(), cursor.number("I")
        if dims > MOST_DIMS:
            raise CheckpointError(f"{path}: {name} has {dims} dims; fetch it again")
        shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
        while len(shape) > 1 and shape[0] == 1:  # some programs write these, and some do not
            shape = shape[1:]
        described.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = facts.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}: it must be a power of 2")
    begin = -(-cursor.at // alignment) * alignment
    tensors = distinct([(each[0], _tensor(path, *each, begin, len(cursor.content))) for each in described])
    _check_places(path, tensors.values(), cursor.at, alignment, len(cursor.content))
    return GGUF(facts, tensors)


def _check_places(path: Path, tensors: Iterable[FileTensor], end: int, alignment: int, size: int) -> None:
    """Raise CheckpointError unless tensors lie as the format says: in the order in which the header lists them, each at
    the next multiple of the ``alignment`` behind the one before, from the header's ``end`` to the end of the file."""
    for tensor in tensors:
        if tensor.offset != (expected := -(-end // alignment) * alignment):
            raise CheckpointError(
                f"{path} is damaged: its header places {tensor.name} at byte {tensor.offset}, but the tensors before "
                f"it end such that it must begin at byte {expected}. Fetch it again"
            )
        end = tensor.offset + tensor.nbytes
    if size - end >= alignment:
        raise CheckpointError(f"{path} is damaged: its tensors end at byte {end} of {size}. Fetch it again")


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, begin: int, size: int) -> FileTensor:
    where, tensor = (name, str(path), shape), None
    if kind in _PLAIN:
        dtype, numpy = _PLAIN[kind]
        tensor = PlainTensor(*where, dtype, begin + offset, numpy)
    elif kind in KINDS:
        if not shape or shape[-1] % KINDS[kind].numbers:
            blocks = f"blocks of {KINDS[kind].numbers}"
            raise CheckpointError(f"{path}: {name} is {list(shape)}, which does not fall into {blocks}")
        tensor = BlockedTensor(*where, KINDS[kind].name, begin + offset)
    else:
        known = ", ".join([dtype for dtype, _ in _PLAIN.values()] + list(BY_NAME))
        raise CheckpointError(
            f"{path}: {name} is of type number {kind}, which is not read here. Take the file in one of {known}"
        )
    if (end := tensor.offset + tensor.nbytes) > size:
        raise CheckpointError(f"{path} is truncated: {name} should extend to byte {end} of {size}. Fetch it again")
    return tensor


class _Cursor:
    """Where one is in a file."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at = content, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.content):
            raise ValueError(_CUT)
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _TRUTH:
            return self.truths(1)[0]
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            raise ValueError(f"a fact of type number {kind}")
        if depth == DEPTH:
            raise RecursionError
        of, count = self.number("I"), self.number("Q")
        if of == _TRUTH:
            return self.truths(count)
        if of in _NUMBERS:
            code = np.dtype(f"<{_NUMBERS[of]}")
            return np.frombuffer(self.take(count * code.itemsize), code).tolist()
        return self._texts(count) if of == _TEXT else [self.value(of, depth + 1) for _ in range(count)]

    def truths(self, count: int) -> list[bool]:
        if (content := self.take(count)).strip(b"\0\1"):
            raise ValueError("a fact that is true or false is a byte other than 0 and 1")
        return [byte == 1 for byte in content]

    def _texts(self, count: int) -> list[str]:
        """As so many times ``text``, in a loop of its own: a vocabulary has a quarter of a million."""
        found, at, content, length = [], self.at, self.content, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + length(content, at)[0]
                found.append(content[begin:at].decode("utf-8", errors="surrogateescape"))
        except (struct.error, OverflowError):
            raise ValueError(_CUT) from None
        self.at = at
        self.take(0)
        return found
