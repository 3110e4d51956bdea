""".npz: NumPy arrays in a zip file; what is not compressed is mapped."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np

from spmd_engine.foreign import distinct, reading
from spmd_engine.formats.tensor import MappedArray

_LOCAL_HEADER = 30  # bytes of a zip member's own header, before its name and its extra field


def npz_names(path: str | Path) -> tuple[str, ...]:
    """The names of the arrays; raises UsageError for a file that is damaged or no .npz."""
    with _opened(path) as archive:
        return tuple(distinct([(name.removesuffix(".npy"), None) for name in archive.namelist()]))


def read_npz(path: str | Path, name: str) -> MappedArray | np.ndarray:
    """An array: where it lies in the file or, of a compressed one (``savez_compressed``), the array itself.

    Its checksum is compared in any case. Raises UsageError for what is damaged, and for arrays of Python's objects.
    """
    with _opened(path, name) as archive:
        info = archive.getinfo(f"{name}.npy")
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"{name} is in version {version} of NumPy's format")
            read_header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
            shape, fortran_order, dtype = read_header(member)
            begins, expected = member.tell(), prod(shape) * dtype.itemsize
            if dtype.hasobject:
                raise ValueError(f"{name} holds Python's objects")
            if min(shape, default=0) < 0 or info.file_size - begins != expected:
                raise ValueError(f"{name} is {shape} of {dtype}, {expected} bytes, but has {info.file_size - begins}")
            if info.compress_type != zipfile.ZIP_STORED or fortran_order:
                member.seek(0)
                return np.lib.format.read_array(member, allow_pickle=False)
            while member.read(1 << 20):  # to its end, where the checksum is compared
                pass
    with open(path, "rb") as file:
        file.seek(info.header_offset + _LOCAL_HEADER - 4)
        lengths = np.frombuffer(file.read(4), "<u2")
    offset = info.header_offset + _LOCAL_HEADER + int(lengths.sum()) + begins
    return MappedArray(str(Path(path).resolve()), dtype.str, offset, shape)


@contextmanager
def _opened(path: str | Path, name: str = "") -> Iterator[zipfile.ZipFile]:
    what = f"{path}: array {name!r}" if name else str(path)
    with (
        reading(f"{what} is damaged or cannot be read", ". Write or fetch it again"),
        zipfile.ZipFile(path) as archive,
    ):
        yield archive
