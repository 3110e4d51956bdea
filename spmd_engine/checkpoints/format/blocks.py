"""Blocks in safetensors files: their dtypes, their bytes, read with their hashes checked, and errors about them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.dtypes import described
from spmd_engine.errors import CheckpointError
from spmd_engine.sharding.rectangles import Rectangle

_NAMES = {  # in files, by their names in NumPy and in ml_dtypes
    "bool": "BOOL",
    **{f"{kind}{8 * size}": f"{kind[0].upper()}{8 * size}" for kind in ("int", "uint") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": f"F{8 * size}" for size in (2, 4, 8)},
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class _Dtypes(Mapping[str, np.dtype]):
    """By their names in files. Those of ml_dtypes are made when they are asked for: few files have any."""

    _described = {name: text for text, name in _NAMES.items()}

    def __init__(self) -> None:
        self._made: dict[str, np.dtype] = {}

    def __getitem__(self, name: str) -> np.dtype:
        if name not in self._made:
            self._made[name] = described(self._described[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def __contains__(self, name: object) -> bool:
        return name in self._described


DTYPES: Mapping[str, np.dtype] = _Dtypes()


def dtype_name(dtype: np.dtype, of: str) -> str:
    """What files call a dtype, in whatever byte order; raises CheckpointError where the format has none for it."""
    dtype = np.dtype(dtype)
    if dtype.fields is not None or dtype.name not in _NAMES:
        raise CheckpointError(f"{of} is of dtype {dtype}, which safetensors files do not know")
    return _NAMES[dtype.name]


IN_CACHE = 1 << 18  #: bytes that are hashed, and then looked at while they are in the processor's cache


def read_block(
    path: Path,
    offset: int,
    shape: Sequence[int],
    dtype: np.dtype,
    sha256: str,
    name: str,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """A block, its hash checked; raises CheckpointError for any byte that is not the one that was written.

    ``out``, contiguous, of this shape and dtype, is where it is read to, if given.
    """
    block = np.empty(shape, dtype) if out is None else out
    data = block.reshape(-1).view(np.uint8).data
    try:
        with path.open("rb", buffering=0) as file:
            is_whole = read_into(data, file.fileno(), offset)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not is_whole:
        raise truncated(path, name, offset + data.nbytes)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise damaged(path, name, offset, data.nbytes)
    return block


def read_into(data: memoryview, descriptor: int, offset: int) -> bool:
    """Fill ``data`` from an open file, from this byte on; whether there was enough. Raises OSError."""
    done = 0
    while done < data.nbytes and (count := os.preadv(descriptor, [data[done:]], offset + done)):
        done += count
    return done == data.nbytes


def truncated(path: Path, name: str, end: int) -> CheckpointError:
    """What is said of a block whose file ends before it does."""
    return CheckpointError(f"{path} is truncated: {name} should extend to byte {end}")


def damaged(path: Path, name: str, offset: int, nbytes: int) -> CheckpointError:
    """What is said of a block whose hash is not the one that was written."""
    return CheckpointError(
        f"{path} is damaged: {name} is not what was written (bytes {offset} to {offset + nbytes}; its "
        "SHA-256 differs). Take this checkpoint from a copy, or remove its folder to continue from the previous one"
    )


def block_name(name: str, piece: Rectangle, shape: Sequence[int]) -> str:
    """What a block is called in its file: as its array, if it is all of it."""
    return name if piece == Rectangle.whole(shape) else f"{name}{piece}"


def is_finite(x: np.ndarray) -> bool:
    """Whether all values are finite: numbers that are, and whatever is no number."""
    return x.dtype.kind not in "fcV" or bool(np.isfinite(x).all())


def host_array(block: Array) -> np.ndarray:
    """A block on the host in C order, little-endian."""
    host = np.asarray(backend_of(block).to_host(block), order="C")
    return host.astype(host.dtype.newbyteorder("<"), copy=False) if host.dtype.byteorder == ">" else host


def bytes_of(host: np.ndarray) -> memoryview:
    """The bytes of a contiguous array."""
    return host.reshape(-1).view(np.uint8).data
