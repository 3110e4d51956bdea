"""Safetensors files as anybody writes them: the header is believed only as far as the file bears it out.

Eight bytes say how long the header is; the header, JSON, says of each tensor dtype, shape, and where it lies behind
the header. Read here and not by its library, which reads BF16 tensors whole, and maps nothing for others to slice.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import distinct, parse_json, reading
from spmd_engine.formats.tensor import PlainTensor

#: What the format calls dtypes of numbers that weights have, and what NumPy does.
NUMPY = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: The same of what else lies beside weights, masks and the like, which nobody reads; of small floats, bytes.
OTHERS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F8_E4M3": "uint8", "F8_E5M2": "uint8", "F8_E8M0": "uint8", "C64": "complex64",
}  # fmt: skip
LARGEST_HEADER = 100_000_000  #: bytes, as its library has it


def read_safetensors(path: str | Path) -> dict[str, PlainTensor]:
    """The tensors of a file by name; nothing but the header is read.

    Raises CheckpointError, naming the tensor, for a header that cannot be: one that is cut short or no JSON, tensors
    of unknown dtypes, or that do not lie in the file side by side.
    """
    described, after, size = read_header(path)
    described.pop("__metadata__", None)
    return tensors_of(Path(path), described, after, size)


def tensors_of(path: Path, described: dict[str, Any], after: int, size: int) -> dict[str, PlainTensor]:
    """The tensors that a header describes, in the order in which they lie; as ``read_safetensors``."""
    tensors, end = {}, 0
    for name, each in sorted(described.items(), key=lambda item: _begin(path, *item)):
        tensor = _tensor(path, name, each, after)
        if tensor.offset - after != end:
            raise CheckpointError(f"{path}: {name} begins at byte {tensor.offset - after}, not where others end")
        end += tensor.nbytes
        tensors[name] = tensor
    if after + end != size:
        raise CheckpointError(
            f"{path}: its tensors need {after + end} bytes, the file has {size}: it is truncated or damaged"
        )
    return tensors


def read_header(path: str | Path, largest: int = LARGEST_HEADER) -> tuple[dict[str, Any], int, int]:
    """What a file's header says by name, at which byte what follows it begins, and the file's size.

    Raises CheckpointError for a header that is cut short, has more bytes than the ``largest``, is no JSON object, or
    gives a name twice.
    """
    path = Path(path)
    with reading(f"{path} cannot be read as a safetensors file: its header", "", CheckpointError):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(largest, size - 8):
                raise CheckpointError(
                    f"{path}: a header of {length} bytes in a file of {size}: it is truncated or damaged"
                )
            described = parse_json(file.read(length), distinct)
    if not isinstance(described, dict):
        raise CheckpointError(f"{path}: its header is no JSON object")
    return described, 8 + length, size


def _begin(path: Path, name: str, described: object) -> int:
    try:
        begin = described["data_offsets"][0]  # type: ignore[index]
    except (TypeError, KeyError, IndexError):
        begin = None
    if type(begin) is not int:
        raise CheckpointError(f"{path}: the header does not say where {name} lies")
    return begin


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _tensor(path: Path, name: str, described: dict, after: int) -> PlainTensor:
    dtype, shape, offsets = described.get("dtype"), described.get("shape"), described.get("data_offsets")
    numpy = (NUMPY | OTHERS).get(dtype) if isinstance(dtype, str) else None
    if not isinstance(dtype, str) or numpy is None:
        raise CheckpointError(f"{path}: {name} is of dtype {dtype}; weights are read of {', '.join(NUMPY)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: the header says of {name} shape {shape} at {offsets}")
    needed = prod(shape) * (2 if numpy == "bfloat16" else np.dtype(numpy).itemsize)
    if offsets[1] - offsets[0] != needed:
        said = f"{offsets[1] - offsets[0]} bytes for {name}, {dtype}{shape}, which needs {needed}"
        raise CheckpointError(f"{path}: the header has {said}")
    return PlainTensor(name, str(path), tuple(shape), dtype, after + offsets[0], numpy)
