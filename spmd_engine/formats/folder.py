"""A folder of images, with a subfolder a class; each file is read when it is asked for. Needs Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.foreign import reading

_GREY = {"1", "L", "I;16", "LA"}  # Pillow's modes of one channel; all others become three
_HINT = "pip install 'spmd_engine[images]'"


@dataclass(frozen=True)
class ImageFiles:
    """Images[n h w c] of bytes, one a file: rows by numbers or slices, read anew each time.

    Plain values, as a MappedArray is. Raises UsageError, naming the file, for one that is damaged or has changed its
    size.
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
        """As of a MappedArray: something to take rows from."""
        return self

    def _read(self, path: str) -> np.ndarray:
        with (
            reading(f"{path} is damaged or cannot be read", ". Replace or remove it"),
            _pillow().open(path) as image,
        ):
            pixels = np.asarray(image.convert("L" if self.shape[3] == 1 else "RGB"))
        height, width = pixels.shape[:2]
        if (height, width) != tuple(self.shape[1:3]):
            raise UsageError(_mixed(path, (height, width), self.shape[1:3]))
        return pixels.reshape(self.shape[1:])


def image_files(folder: str | Path) -> tuple[ImageFiles, np.ndarray, list[str]]:
    """The images of a folder, the class of each (int64[n]), and the names of the classes: of its subfolders.

    Only the beginnings of files are read: sizes, and whether there is colour. Raises UsageError for a folder without
    such subfolders, for files that are no images, and for images of several sizes.
    """
    open_image = _pillow().open
    names = sorted(each.name for each in Path(folder).iterdir() if each.is_dir() and not each.name.startswith("."))
    paths, labels, modes, size = [], [], set(), None
    for label, name in enumerate(names):
        for path in sorted(Path(folder, name).iterdir()):
            if path.name.startswith(".") or not path.is_file():
                continue
            with (
                reading(f"{path} is no image that Pillow reads", ". Replace or remove it"),
                open_image(path) as image,
            ):
                modes.add(image.mode)
                here = image.height, image.width
            size = size or here
            if here != size:
                raise UsageError(_mixed(str(path), here, size))
            paths.append(str(path.resolve()))
            labels.append(label)
    if size is None:
        raise UsageError(f"{folder}: no images in subfolders, one a class, as in {Path(folder, 'cats', '1.png')}")
    if empty := sorted(set(range(len(names))) - set(labels)):
        raise UsageError(f"{Path(folder, names[empty[0]])}: a class without images. Add some, or remove the folder")
    channels = 1 if modes <= _GREY else 3
    return ImageFiles(tuple(paths), (len(paths), *size, channels)), np.array(labels, np.int64), names


def _mixed(path: str, size: Sequence[int], expected: Sequence[int]) -> str:
    (height, width), (rows, columns) = size, expected
    return (
        f"{path}: {width} x {height} pixels, but those before have {columns} x {rows}. All must be of one size: scale "
        "or crop them first"
    )


def _pillow() -> ModuleType:
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise UsageError(f"a folder of images needs Pillow: {_HINT}") from error
