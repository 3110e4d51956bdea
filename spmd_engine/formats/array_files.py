"""Arrays in files of other programs: IDX and .npz."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from math import prod
from pathlib import Path

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.foreign import distinct, reading, refuse_pointer
from spmd_engine.formats.tensor import MappedArray

# --- IDX, the format of MNIST: four bytes with the dtype and the number of dims, then the sizes, then the numbers

_DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_GZIP = b"\x1f\x8b"
_LONGEST_HEADER = 4 + 4 * 255


def read_idx(path: str | Path) -> MappedArray | np.ndarray:
    """The array of an IDX file: its place in the file or, if the file is compressed (.gz), the array itself.

    Raises UsageError if the file has another format, is damaged, or is longer or shorter than its header says.
    """
    with open(path, "rb") as file:
        content, length = file.read(_LONGEST_HEADER), Path(path).stat().st_size
    if is_compressed := content[:2] == _GZIP:
        content = _unpacked(path, _LONGEST_HEADER)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _DTYPES:
        refuse_pointer(path)
        raise UsageError(f"{path} is no IDX file: it begins with {content[:4].hex(' ') or 'nothing'}. Fetch it again")
    dtype, offset = _DTYPES[content[2]], 4 + 4 * content[3]
    if len(content) < offset:
        raise UsageError(f"{path} ends within its header: it is truncated. Fetch it again")
    shape = tuple(np.frombuffer(content[4:offset], ">u4").tolist())
    expected = prod(shape) * np.dtype(dtype).itemsize
    if is_compressed:
        content = _unpacked(path, offset + expected + 1)  # the last byte shows that there are more
        length = len(content)
    if (rest := length - offset) != expected:
        raise UsageError(
            f"{path}: its header says {' x '.join(map(str, shape))}, {expected} bytes, but "
            f"{'more' if is_compressed and rest > expected else rest} follow: it is truncated, or is another file. "
            "Fetch it again"
        )
    if is_compressed:
        return np.frombuffer(content, dtype, offset=offset).reshape(shape)
    return MappedArray(str(Path(path).resolve()), dtype, offset, shape)


def _unpacked(path: str | Path, most: int) -> bytes:
    """The first bytes of a compressed file's content, ``most`` at the most."""
    with reading(f"{path} is damaged", ". Fetch it again"), gzip.open(path) as file:
        return file.read(most)


# --- .npz: NumPy arrays in a zip file; uncompressed arrays are mapped

_LOCAL_HEADER = 30  # bytes of a zip member's own header, before its name and its extra field
_LONGEST_NPY_HEADER = 1 << 15  # bytes; NumPy itself refuses more than 10,000


def npz_names(path: str | Path) -> tuple[str, ...]:
    """The names of the arrays. Raises UsageError for a file that is damaged or no .npz."""
    with _opened(path) as archive:
        return tuple(distinct([(name.removesuffix(".npy"), None) for name in archive.namelist()]))


def is_of_arrays(path: str | Path) -> bool:
    """Whether a zip file has arrays only. Raises UsageError for a file that is damaged or no zip file."""
    with _opened(path) as archive:
        return all(name.endswith(".npy") for name in archive.namelist())


def read_npz(path: str | Path, name: str) -> MappedArray | np.ndarray:
    """An array: its place in the file or, if it is compressed (``savez_compressed``), the array itself.

    Compares its checksum in both cases. Raises UsageError for a damaged array, and for an array of Python objects.
    """
    with _opened(path, name) as archive:
        info = archive.getinfo(f"{name}.npy")
        with archive.open(info) as member:
            head = BytesIO(member.read(_LONGEST_NPY_HEADER))
            version = np.lib.format.read_magic(head)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"{name} is in version {version} of NumPy's format")
            read_header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
            shape, fortran_order, dtype = read_header(head)
            header_bytes, expected = head.tell(), prod(shape) * dtype.itemsize
            stored = info.file_size - header_bytes
            if dtype.hasobject:
                raise ValueError(f"{name} holds Python's objects")
            if min(shape, default=0) < 0 or stored != expected:
                raise ValueError(f"{name} is {shape} of {dtype}, {expected} bytes, but has {stored}")
            if info.compress_type != zipfile.ZIP_STORED or fortran_order:
                member.seek(0)
                return np.lib.format.read_array(member, allow_pickle=False)
            while member.read(1 << 20):  # zipfile compares the checksum at the end
                pass
    with open(path, "rb") as file:
        file.seek(info.header_offset + _LOCAL_HEADER - 4)
        lengths = np.frombuffer(file.read(4), "<u2")
    offset = info.header_offset + _LOCAL_HEADER + int(lengths.sum()) + header_bytes
    return MappedArray(str(Path(path).resolve()), dtype.str, offset, shape)


@contextmanager
def _opened(path: str | Path, name: str = "") -> Iterator[zipfile.ZipFile]:
    subject = f"{path}: array {name!r}" if name else str(path)
    hint = ". Write or fetch it again"
    with reading(f"{subject} is damaged or cannot be read", hint), zipfile.ZipFile(path) as archive:
        yield archive
