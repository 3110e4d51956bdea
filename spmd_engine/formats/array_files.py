"""Arrays and images in files of other programs: IDX, .npz, and folders of images."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.foreign import distinct, reading
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


# --- A folder of images, with a subfolder for each class; it needs Pillow

#: Formats that are read. Pillow chooses by content, whatever the name says: others of its decoders start programs.
PICTURES = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
_GREY = {"1", "L", "I;16", "LA"}  # Pillow's modes of one channel; images of other modes get three


@dataclass(frozen=True)
class ImageFiles:
    """Images[n h w c] of bytes, one file for each. An index by numbers or a slice reads the files each time.

    It consists of plain values, like a MappedArray. Raises UsageError, naming the file, for an image that is damaged or
    has changed its size.
    """

    paths: Sequence[str]
    shape: tuple[int, ...]  #: n h w c
    dtype = np.dtype(np.uint8)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, numbers: slice | np.ndarray) -> np.ndarray:
        chosen = np.arange(len(self))[numbers] if isinstance(numbers, slice) else numbers
        rows = np.empty((len(chosen), *self.shape[1:]), self.dtype)
        for row, number in zip(rows, chosen, strict=True):
            row[...] = self._read(self.paths[int(number)])
        return rows

    def open(self) -> ImageFiles:
        """An object that is indexed by rows, as ``MappedArray.open`` returns it."""
        return self

    def _read(self, path: str) -> np.ndarray:
        hint = ". Replace or remove it"
        with reading(f"{path} is damaged or cannot be read", hint), _open_picture(path) as image:
            _check_size(path, (image.height, image.width), self.shape[1:3])
            pixels = np.asarray(image.convert("L" if self.shape[3] == 1 else "RGB"))
        return pixels.reshape(self.shape[1:])


def image_files(folder: str | Path) -> tuple[ImageFiles, np.ndarray, list[str]]:
    """The images of a folder, their classes (int64[n]), and the names of the classes, which are its subfolders.

    Reads only the beginnings of files, for sizes and channels. Raises UsageError for a folder without such
    subfolders, for files that are no images, and for images of several sizes.
    """
    names = sorted(path.name for path in Path(folder).iterdir() if path.is_dir() and not path.name.startswith("."))
    paths, labels, modes, size = [], [], set(), None
    for label, name in enumerate(names):
        for path in sorted(Path(folder, name).iterdir()):
            if path.name.startswith(".") or not path.is_file():
                continue
            hint = f". Replace or remove it; formats: {', '.join(PICTURES)}"
            with reading(f"{path} is no image in a format that is read", hint), _open_picture(path) as image:
                modes.add(image.mode)
                image_size = image.height, image.width
            size = size or image_size
            _check_size(str(path), image_size, size)
            paths.append(str(path.resolve()))
            labels.append(label)
    if size is None:
        raise UsageError(f"{folder}: no images in subfolders, one a class, as in {Path(folder, 'cats', '1.png')}")
    if empty := sorted(set(range(len(names))) - set(labels)):
        raise UsageError(f"{Path(folder, names[empty[0]])}: a class without images. Add some, or remove the folder")
    channels = 1 if modes <= _GREY else 3
    return ImageFiles(tuple(paths), (len(paths), *size, channels)), np.array(labels, np.int64), names


def _check_size(path: str, size: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(size) != tuple(expected):
        raise UsageError(
            f"{path}: {size[1]} x {size[0]} pixels, but those before have {expected[1]} x {expected[0]}. All must be "
            "of one size: scale or crop them first"
        )


def _open_picture(path: str | Path) -> Any:
    """An image of Pillow, which reads its pixels later. Raises UsageError without Pillow, and Pillow's errors."""
    try:
        pillow = import_module("PIL.Image")
    except ImportError as error:
        raise UsageError("a folder of images needs Pillow: pip install 'spmd_engine[images]'") from error
    return pillow.open(path, formats=PICTURES)
