"""IDX, the format of MNIST: four bytes say dtype and number of dims, then come the sizes, then the numbers."""

from __future__ import annotations

import gzip
from math import prod
from pathlib import Path

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.foreign import reading
from spmd_engine.formats.tensor import MappedArray

_DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_GZIP = b"\x1f\x8b"


def read_idx(path: str | Path) -> MappedArray | np.ndarray:
    """The array of an IDX file: where it lies in the file or, of a compressed one (.gz), the array itself.

    Raises UsageError if the file is none, is compressed wrongly, or is longer or shorter than its header says.
    """
    with open(path, "rb") as file:
        start = file.read(4 + 4 * 255)  # the longest header there can be
        if start[:2] != _GZIP:
            dtype, shape, offset = _header(path, start)
            _check_length(path, dtype, shape, Path(path).stat().st_size - offset)
            return MappedArray(str(Path(path).resolve()), dtype, offset, shape)
    with reading(f"{path} is damaged", ". Fetch it again"), gzip.open(path) as file:
        content = file.read()
    dtype, shape, offset = _header(path, content)
    _check_length(path, dtype, shape, len(content) - offset)
    return np.frombuffer(content, dtype, offset=offset).reshape(shape)


def _header(path: str | Path, start: bytes) -> tuple[str, tuple[int, ...], int]:
    """dtype, shape and the number of bytes of the header."""
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _DTYPES:
        raise UsageError(f"{path} is no IDX file: it begins with {start[:4].hex(' ') or 'nothing'}. Fetch it again")
    offset = 4 + 4 * start[3]
    if len(start) < offset:
        raise UsageError(f"{path} ends within its header: it is truncated. Fetch it again")
    return _DTYPES[start[2]], tuple(np.frombuffer(start[4:offset], ">u4").tolist()), offset


def _check_length(path: str | Path, dtype: str, shape: tuple[int, ...], length: int) -> None:
    expected = prod(shape) * np.dtype(dtype).itemsize
    if length != expected:
        raise UsageError(
            f"{path}: its header says {' x '.join(map(str, shape))}, {expected} bytes, but {length} follow: it was cut "
            "short, or is another file. Fetch it again"
        )
