"""Blocks in safetensors files: their dtypes and names, reading them with a check of their hashes, and the errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.safetensors_header import DTYPES
from spmd_engine.sharding import Rectangle

#: The names of dtypes in files, by their names in NumPy and ml_dtypes.
_NAMES = {numpy: name for name, numpy in reversed(DTYPES.items())}  # U8, and not F8_E8M0, is that of uint8


def dtype_name(dtype: np.dtype, what: str) -> str:
    """The name of the dtype of ``what`` in files, for any byte order. Raises CheckpointError if it has none."""
    if name := _name_of(dtype):
        return name
    raise CheckpointError(f"{what} is of dtype {dtype}, which safetensors files do not know")


@cache
def _name_of(dtype: np.dtype) -> str | None:
    """The name of a dtype in files. Cached, because NumPy composes ``dtype.name`` each time it is asked for."""
    dtype = np.dtype(dtype)
    return _NAMES.get(dtype.name) if dtype.fields is None else None


HASH = 32  #: bytes of a SHA-256
IN_CACHE = 1 << 18  #: bytes that are hashed, and then checked while they are in the processor's cache


def read_into(data: memoryview, descriptor: int, offset: int) -> bool:
    """Fill ``data`` from an open file, from byte ``offset`` on; return whether the file had enough. Raises OSError."""
    done = 0
    while done < data.nbytes and (count := os.preadv(descriptor, [data[done:]], offset + done)):
        done += count
    return done == data.nbytes


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
