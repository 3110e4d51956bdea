"""GGUF files of llama.cpp: metadata by name, and tensors, plain or packed in blocks. Versions 2 and 3, little-endian.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Blocks, in which numbers of a few bits share a scale
and often an offset: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. The argument ``b`` of an unpacking
function is the bytes of n blocks, uint8[n bytes]; the result is float32[n numbers], with the same products as in ggml.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import DEPTH, distinct, reading, refuse_pointer
from spmd_engine.formats.safetensors_header import dtype_of
from spmd_engine.formats.tensor import FileTensor, Index, PlainTensor

#: The values of the 4 bits of an IQ4 number.
_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


@dataclass(frozen=True)
class BlockKind:
    """A kind of block: the count of packed numbers, the bytes, and the function that unpacks them."""

    name: str
    numbers: int
    nbytes: int
    unpack: Callable[[np.ndarray], np.ndarray]


def _half(b: np.ndarray, at: int) -> np.ndarray:
    """float32[n 1]: the float16 that begins at byte ``at``."""
    return b[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(b: np.ndarray) -> np.ndarray:
    """uint8[... 2 bytes]: the low four bits of all bytes, then the high ones."""
    return np.stack((b & 15, b >> 4), axis=-2)


def _bits(b: np.ndarray, shifts: range, mask: int) -> np.ndarray:
    """uint8[... shifts bytes]: each byte shifted right by each shift, and masked."""
    return b[..., None, :] >> np.array(shifts, np.uint8)[:, None] & np.uint8(mask)


def _q4_0(b: np.ndarray) -> np.ndarray:
    return (_nibbles(b[:, 2:]).reshape(-1, 32).astype(np.int8) - 8) * _half(b, 0)


def _q4_1(b: np.ndarray) -> np.ndarray:
    return _nibbles(b[:, 4:]).reshape(-1, 32) * _half(b, 0) + _half(b, 2)


def _fifth_bit(b: np.ndarray) -> np.ndarray:
    """uint8[n 32] of four bytes: one bit for each number, with the value 16."""
    return np.unpackbits(b, axis=1, bitorder="little") << 4


def _q5_0(b: np.ndarray) -> np.ndarray:
    small = _nibbles(b[:, 6:]).reshape(-1, 32) | _fifth_bit(b[:, 2:6])
    return (small.astype(np.int8) - 16) * _half(b, 0)


def _q5_1(b: np.ndarray) -> np.ndarray:
    small = _nibbles(b[:, 8:]).reshape(-1, 32) | _fifth_bit(b[:, 4:8])
    return small * _half(b, 0) + _half(b, 2)


def _q8_0(b: np.ndarray) -> np.ndarray:
    return b[:, 2:].view(np.int8) * _half(b, 0)


def _q2_k(b: np.ndarray) -> np.ndarray:
    """16 scales and offsets of 4 bits; 2 bits for each number; four neighbouring runs of 32 numbers share 32 bytes."""
    small = _bits(b[:, 16:80].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 16, 16)
    scale, offset = _half(b, 80) * (b[:, :16] & 15), _half(b, 82) * (b[:, :16] >> 4)
    return (scale[:, :, None] * small - offset[:, :, None]).reshape(-1, 256)


def _q3_k(b: np.ndarray) -> np.ndarray:
    """16 scales of 6 bits, minus 32; numbers of 3 bits, minus 4: two as in Q2_K, the third in the first 32 bytes."""
    high = _bits(b[:, :32], range(8), 1).reshape(-1, 16, 16)
    small = _bits(b[:, 32:96].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 16, 16)
    low, upper = _nibbles(b[:, 96:104]).reshape(-1, 16), _bits(b[:, 104:108], range(0, 8, 2), 3).reshape(-1, 16)
    scale = _half(b, 108) * ((low | upper << 4).astype(np.int8) - 32)
    return (scale[:, :, None] * ((small | high << 2).astype(np.int8) - 4)).reshape(-1, 256)


def _scales_and_offsets(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32[n 8 1] each: 6 bits, in the twelve bytes after the two float16 that multiply scales and offsets."""
    first, second, third = (b[:, at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    offset = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    return (_half(b, 0) * scale)[:, :, None], (_half(b, 2) * offset)[:, :, None]


def _q4_k(b: np.ndarray) -> np.ndarray:
    scale, offset = _scales_and_offsets(b)
    small = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (scale * small - offset).reshape(-1, 256)


def _q5_k(b: np.ndarray) -> np.ndarray:
    scale, offset = _scales_and_offsets(b)
    small = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | _bits(b[:, 16:48], range(8), 1) << 4
    return (scale * small - offset).reshape(-1, 256)


def _q6_k(b: np.ndarray) -> np.ndarray:
    """16 scales of 8 bits; numbers of 4 + 2 bits, minus 32; both halves of the 256 numbers are stored separately."""
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 128)
    high = _bits(b[:, 128:192].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 2, 128)
    small = ((low | high << 4).astype(np.int8) - 32).reshape(-1, 16, 16)
    return ((_half(b, 208) * b[:, 192:208].view(np.int8))[:, :, None] * small).reshape(-1, 256)


def _iq4_nl(b: np.ndarray) -> np.ndarray:
    return _LEVELS[_nibbles(b[:, 2:]).reshape(-1, 32)] * _half(b, 0)


def _iq4_xs(b: np.ndarray) -> np.ndarray:
    """8 scales of 6 bits, minus 32: the lower four bits in bytes 4 to 7, the upper two in bytes 2 and 3."""
    low = np.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    high = (b[:, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 8)
    scale = _half(b, 0) * ((low | high << 4).astype(np.int8) - 32)
    return (scale[:, :, None] * _LEVELS[_nibbles(b[:, 8:].reshape(-1, 8, 16))].reshape(-1, 8, 32)).reshape(-1, 256)


#: Kinds of blocks by their type number in a file.
KINDS = {
    2: BlockKind("Q4_0", 32, 18, _q4_0),
    3: BlockKind("Q4_1", 32, 20, _q4_1),
    6: BlockKind("Q5_0", 32, 22, _q5_0),
    7: BlockKind("Q5_1", 32, 24, _q5_1),
    8: BlockKind("Q8_0", 32, 34, _q8_0),
    10: BlockKind("Q2_K", 256, 84, _q2_k),
    11: BlockKind("Q3_K", 256, 110, _q3_k),
    12: BlockKind("Q4_K", 256, 144, _q4_k),
    13: BlockKind("Q5_K", 256, 176, _q5_k),
    14: BlockKind("Q6_K", 256, 210, _q6_k),
    20: BlockKind("IQ4_NL", 32, 18, _iq4_nl),
    23: BlockKind("IQ4_XS", 256, 136, _iq4_xs),
}
BY_NAME = {kind.name: kind for kind in KINDS.values()}


# --- Files


_MAGIC = b"GGUF"
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")  # a file of a model in several files
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_KIND = {code: kind for kind, code in _NUMBERS.items()}
_BOOL, _TEXT, _LIST = 7, 8, 9
_PLAIN = {0: ("F32", "float32"), 1: ("F16", "float16"), 28: ("F64", "float64"), 30: ("BF16", "bfloat16")}
_TRUNCATED = "it ends within its header: it is truncated"
MOST_DIMS = 4
ALIGNMENT = 32  #: bytes, of a file that does not say it, and of those that are written
ELEMENTS = 1 << 22  #: elements that are unpacked at a time


@dataclass(frozen=True)
class GGUF:
    """The metadata and the tensors of a file."""

    facts: dict[str, Any]
    tensors: dict[str, FileTensor]


@dataclass(frozen=True)
class BlockedTensor(FileTensor):
    """A tensor in blocks of neighbours along its last dim; a block has a scale, and a few bits for each number."""

    def read(self, split: Sequence[Sequence[int]], index: Index) -> np.ndarray:
        outer = [size for sizes in split[:-1] for size in sizes]
        row = self.shape[-1] // BY_NAME[self.dtype].numbers * BY_NAME[self.dtype].nbytes
        raw = np.memmap(self.path, np.uint8, "r", self.offset, (*outer, row))[tuple(index[: len(outer)])]
        inner = tuple(index[len(outer) :])
        rows = raw.reshape(-1, row)
        probe = np.empty(split[-1], bool)[inner]
        out = np.empty((len(rows), *probe.shape), np.float32)
        step = max(1, ELEMENTS // self.shape[-1])
        for first in range(0, len(rows), step):  # whole rows, a few at a time
            unpacked = self._unpack(rows[first : first + step])
            out[first : first + step] = unpacked.reshape(-1, *split[-1])[(slice(None), *inner)]
        return out.reshape(*raw.shape[:-1], *probe.shape)

    def _unpack(self, rows: np.ndarray) -> np.ndarray:
        """Unpack rows[n bytes] to float32[n last]."""
        kind = BY_NAME[self.dtype]
        with np.errstate(invalid="ignore", over="ignore"):  # the reader refuses numbers that are not finite
            return kind.unpack(rows.reshape(-1, kind.nbytes)).reshape(len(rows), -1)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // BY_NAME[self.dtype].numbers * BY_NAME[self.dtype].nbytes


def is_gguf(path: str | Path) -> bool:
    """Whether the file at the path begins with GGUF's magic number."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_gguf(path: str | Path) -> GGUF:
    """The metadata and the tensors of a file, from its header alone. Shapes have the outermost dim first.

    ``path`` may be any file of a model in several files; the first has the metadata. Raises CheckpointError for a file
    that is missing, truncated or no GGUF file, and, naming the tensor, for unsupported types and misplaced tensors.
    """
    path = Path(path)
    file = _read_file(path)
    count = file.facts.get("split.count", 1)
    return file if count in (0, 1) else _joined([_read_file(part) for part in _parts(path, count)], path)


def _parts(path: Path, count: int) -> list[Path]:
    """The ``count`` files of a model, of which ``path`` is one."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match[2]) != count:
        raise CheckpointError(f"{path} is one of {count} files of a model; call them NAME-00001-of-00003.gguf, ...")
    parts = [path.with_name(f"{match[1]}-{number:05}-of-{match[2]}.gguf") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{path} is one of {count} files of a model, of which {part.name} is not there")
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
        refuse_pointer(path, CheckpointError)
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
        while len(shape) > 1 and shape[0] == 1:  # some programs write leading dims of size 1
            shape = shape[1:]
        described.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = facts.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}: it must be a power of 2")
    begin = -(-cursor.at // alignment) * alignment
    tensors = distinct([(entry[0], _tensor(path, *entry, begin, len(cursor.content))) for entry in described])
    _check_places(path, tensors.values(), cursor.at, alignment, len(cursor.content))
    return GGUF(facts, tensors)


def _check_places(path: Path, tensors: Iterable[FileTensor], end: int, alignment: int, size: int) -> None:
    """Raise CheckpointError unless tensors are placed as in the format: in the order of the header, each at the next
    multiple of ``alignment`` after the one before, from the header's ``end`` to the end of the file."""
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
        types = ", ".join([dtype for dtype, _ in _PLAIN.values()] + list(BY_NAME))
        raise CheckpointError(
            f"{path}: {name} is of type number {kind}, which is not read here. Take the file in one of {types}"
        )
    if (end := tensor.offset + tensor.nbytes) > size:
        raise CheckpointError(f"{path} is truncated: {name} should extend to byte {end} of {size}. Fetch it again")
    return tensor


# --- Writing


def gguf_header(facts: Mapping[str, Any], tensors: Sequence[tuple[str, str, Sequence[int]]]) -> tuple[bytes, list[int]]:
    """The header of a file with these facts, and with tensors of these names, dtypes (F32, ...) and shapes, in order.

    Also returns the first byte of each tensor in the file, and the file's size. Numbers have 32 bits.
    """
    types = {name: number for number, (name, _) in _PLAIN.items()}
    parts = [_MAGIC, struct.pack("<IQQ", 3, len(tensors), len(facts))]
    for name, value in facts.items():
        kind, content = _packed(value)
        parts += [_packed_text(name), struct.pack("<I", kind), content]
    ends = [0]
    for name, dtype, shape in tensors:
        parts += [_packed_text(name), struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))]
        parts.append(struct.pack("<IQ", types[dtype], ends[-1]))
        end = ends[-1] + prod(shape) * dtype_of(dtype).itemsize
        ends.append(-(-end // ALIGNMENT) * ALIGNMENT)
    head = b"".join(parts)
    head += bytes(-len(head) % ALIGNMENT)
    return head, [len(head) + end for end in ends]


def _packed_text(text: str) -> bytes:
    content = text.encode(errors="surrogateescape")
    return struct.pack("<Q", len(content)) + content


def _packed(value: Any) -> tuple[int, bytes]:
    """The type number of a fact, and its bytes: natural numbers are unsigned, except in lists."""
    if isinstance(value, bool):
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, int | float):
        code = "f" if isinstance(value, float) else "I" if value >= 0 else "i"
        return _KIND[code], struct.pack(f"<{code}", value)
    if isinstance(value, str):
        return _TEXT, _packed_text(value)
    if value and all(type(item) is int for item in value):
        kind, items = _KIND["i"], [np.array(value, "<i4").tobytes()]
    else:
        kinds = [_packed(item) for item in value]
        kind, items = kinds[0][0] if kinds else _TEXT, [content for _, content in kinds]
    return _LIST, struct.pack("<IQ", kind, len(value)) + b"".join(items)


class _Cursor:
    """A position in a file."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at = content, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.content):
            raise ValueError(_TRUNCATED)
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _BOOL:
            return self.booleans(1)[0]
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            raise ValueError(f"a fact of type number {kind}")
        if depth == DEPTH:
            raise RecursionError
        of, count = self.number("I"), self.number("Q")
        if of == _BOOL:
            return self.booleans(count)
        if of in _NUMBERS:
            code = np.dtype(f"<{_NUMBERS[of]}")
            return np.frombuffer(self.take(count * code.itemsize), code).tolist()
        return self._texts(count) if of == _TEXT else [self.value(of, depth + 1) for _ in range(count)]

    def booleans(self, count: int) -> list[bool]:
        if (content := self.take(count)).strip(b"\0\1"):
            raise ValueError("a fact that is true or false is a byte other than 0 and 1")
        return [byte == 1 for byte in content]

    def _texts(self, count: int) -> list[str]:
        """Read ``count`` texts, in a loop without calls, because a vocabulary has up to a quarter of a million."""
        texts, at, content, length = [], self.at, self.content, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + length(content, at)[0]
                texts.append(content[begin:at].decode("utf-8", errors="surrogateescape"))
        except (struct.error, OverflowError):
            raise ValueError(_TRUNCATED) from None
        self.at = at
        self.take(0)
        return texts
