"""Blocks in safetensors files: their dtypes and names, reading them with a check of their hashes, and the errors."""

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

_NAMES = {  # names of dtypes in files, by their names in NumPy and ml_dtypes
    "bool": "BOOL",
    **{f"{kind}{8 * size}": f"{kind[0].upper()}{8 * size}" for kind in ("int", "uint") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": f"F{8 * size}" for size in (2, 4, 8)},
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class _Dtypes(Mapping[str, np.dtype]):
    """Dtypes by their names in files. Those of ml_dtypes are created on first use, because few files have any."""

    _described = {name: text for text, name in _NAMES.items()}

    def __init__(self) -> None:
        self._created: dict[str, np.dtype] = {}

    def __getitem__(self, name: str) -> np.dtype:
        if name not in self._created:
            self._created[name] = described(self._described[name])
        return self._created[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def __contains__(self, name: object) -> bool:
        return name in self._described


DTYPES: Mapping[str, np.dtype] = _Dtypes()


def dtype_name(dtype: np.dtype, of: str) -> str:
    """The name of a dtype in files, for any byte order. Raises CheckpointError if the format has no name for it."""
    dtype = np.dtype(dtype)
    if dtype.fields is not None or dtype.name not in _NAMES:
        raise CheckpointError(f"{of} is of dtype {dtype}, which safetensors files do not know")
    return _NAMES[dtype.name]


IN_CACHE = 1 << 18  #: bytes that are hashed, and then checked while they are in the processor's cache


def read_block(
    path: Path,
    offset: int,
    shape: Sequence[int],
    dtype: np.dtype,
    sha256: str,
    name: str,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Read a block and check its hash. Raises CheckpointError if any byte differs from what was written.

    The block is read into ``out``, which is contiguous and of this shape and dtype, if it is given.
    """
    block = np.empty(shape, dtype) if out is None else out
    data = block.reshape(-1).view(np.uint8).data
    try:
        with path.open("rb", buffering=0) as file:
            is_complete = read_into(data, file.fileno(), offset)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not is_complete:
        raise truncated(path, name, offset + data.nbytes)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise damaged(path, name, offset, data.nbytes)
    return block


def read_into(data: memoryview, descriptor: int, offset: int) -> bool:
    """Fill ``data`` from an open file, from byte ``offset`` on; return whether the file had enough. Raises OSError."""
    done = 0
    while done < data.nbytes and (count := os.preadv(descriptor, [data[done:]], offset + done)):
        done += count
    return done == data.nbytes


def truncated(path: Path, name: str, end: int) -> CheckpointError:
    """The error for a block that extends beyond the end of its file."""
    return CheckpointError(f"{path} is truncated: {name} should extend to byte {end}")


def damaged(path: Path, name: str, offset: int, nbytes: int) -> CheckpointError:
    """The error for a block with another hash than the one that was written."""
    return CheckpointError(
        f"{path} is damaged: {name} is not what was written (bytes {offset} to {offset + nbytes}; its "
        "SHA-256 differs). Take this checkpoint from a copy, or remove its folder to continue from the previous one"
    )


def block_name(name: str, piece: Rectangle, shape: Sequence[int]) -> str:
    """The name of a block in its file; a block that is a whole array has the name of the array."""
    return name if piece == Rectangle.whole(shape) else f"{name}{piece}"


def is_finite(x: np.ndarray) -> bool:
    """Whether all values are finite; values other than floating-point numbers count as finite."""
    return x.dtype.kind not in "fcV" or bool(np.isfinite(x).all())


def host_array(block: Array) -> np.ndarray:
    """A copy or view of a block on the host, in C order and little-endian."""
    host = np.asarray(backend_of(block).to_host(block), order="C")
    return host.astype(host.dtype.newbyteorder("<"), copy=False) if host.dtype.byteorder == ">" else host


def bytes_of(host: np.ndarray) -> memoryview:
    """The bytes of a contiguous array."""
    return host.reshape(-1).view(np.uint8).data
