"""Where images with a class each come from: scikit-learn's digits, IDX and .npz files, folders of pictures."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.formats import ImageFiles, MappedArray, image_files, npz_names, read_idx, read_npz
from spmd_engine.training.data.array_data import part_of

HELD_OUT = 5  #: one image in so many is for validation where the data have no part for that; the same in every run
#: What a .npz may call images and their classes, and then those that are held out.
NPZ_NAMES = (
    (("x", "y"),),
    (("images", "labels"),),
    (("x_train", "y_train"), ("x_test", "y_test")),
    (("train_images", "train_labels"), ("test_images", "test_labels")),
)
#: What a folder of IDX files has: MNIST's own names, with .gz or without.
IDX_NAMES = (("train-images*", "train-labels*"), ("t10k-images*", "t10k-labels*"))
_BRIGHTEST = 10  #: times white that floats may be: with mean 0 and variance 1, pixels are a few times white
_KNOWN = (
    "a folder of IDX files (train-images-idx3-ubyte, train-labels-idx1-ubyte, ...), an .npz file of arrays x and y, or "
    "a folder with a subfolder of images a class"
)

Part = MappedArray | ImageFiles | np.ndarray


@dataclass(frozen=True)
class ImageSource:
    """Labelled images as they were found, and checked."""

    parts: tuple[Part, ...]  #: [n h w] or [n h w c] each, alike but for n
    y: np.ndarray  #: int64: the class of each image of all parts, from 0
    held_out: np.ndarray  #: numbers of those to validate on
    files: int


def find_images(path: str | None) -> ImageSource:
    """The images of a file or a folder; None: scikit-learn's digits. Raises UsageError, naming the file."""
    if path is None:
        return _digits()
    if path == "":
        raise UsageError("--data is empty: name a file or a folder, or leave the option out")
    root = Path(path)
    if not os.path.exists(root):
        raise UsageError(f"--data {root}: no such file or folder")
    if root.is_dir():
        if any(root.glob(IDX_NAMES[0][0])):
            return _idx(root)
        files, y, _ = image_files(root)
        return _checked([(str(root), files, y)], len(files))
    with root.open("rb") as file:
        if file.read(2) == b"PK":
            return _npz(root)
    raise UsageError(f"--data {root}: not images in a format known here: {_KNOWN}")


def _digits() -> ImageSource:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 pixels from 0 to 16: read from its file, since to import it takes
    seconds."""
    found = find_spec("sklearn")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz" if found and found.origin else None
    if file is None or not file.exists():
        raise UsageError(
            "images are scikit-learn's digits unless --data says otherwise, and scikit-learn is not here: "
            f"pip install 'spmd_engine[images]', or give --data PATH: {_KNOWN}"
        )
    with gzip.open(file, "rt") as lines:
        table = np.loadtxt(lines, np.float32, delimiter=",")
    return _checked([(str(file), table[:, :-1].reshape(-1, 8, 8) / 16, table[:, -1].astype(np.int64))], 1)


def _idx(folder: Path) -> ImageSource:
    parts = []
    for patterns in IDX_NAMES:
        files = [min(folder.glob(pattern), default=None) for pattern in patterns]  # the first: not the .gz, if both
        if not any(files):
            continue
        if not all(files):
            raise UsageError(f"--data {folder}: {patterns[0]} and {patterns[1]} go together, and one is missing")
        parts.append((str(files[0]), read_idx(files[0]), _whole(read_idx(files[1]))))
    return _checked(parts, 2 * len(parts))


def _npz(file: Path) -> ImageSource:
    there = set(npz_names(file))
    for pairs in NPZ_NAMES:
        if there.issuperset(pairs[0]):
            found = [pair for pair in pairs if there.intersection(pair)]
            if missing := sorted({name for pair in found for name in pair} - there):
                raise UsageError(f"--data {file}: it has no {missing[0]}, which goes with what it holds out")
            return _checked([(str(file), read_npz(file, x), _whole(read_npz(file, y))) for x, y in found], 1)
    raise UsageError(
        f"--data {file}: it has the arrays {', '.join(sorted(there)) or 'none'}; call images x and their classes y (or "
        "images and labels, or x_train, y_train, x_test, y_test)"
    )


def _whole(array: MappedArray | np.ndarray) -> np.ndarray:
    return np.array(array.open() if isinstance(array, MappedArray) else array)


def _checked(found: list[tuple[str, Part, np.ndarray]], files: int) -> ImageSource:
    """A source of parts, each with where it is from and its classes; a second part is what is held out."""
    parts, classes = [], []
    for where, x, y in found:
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        _check_images(where, x, parts)
        _check_classes(where, x.shape[0], y, classes)
        parts.append(x)
        classes.append(y.astype(np.int64))
    y = np.concatenate(classes)
    held_out = np.arange(len(classes[0]), len(y)) if len(parts) > 1 else part_of(len(y), -(-len(y) // HELD_OUT), 0)
    if not 0 < len(held_out) < len(y):
        raise UsageError(f"--data {found[0][0]}: {len(y)} images, too few to learn from some and hold out others")
    return ImageSource(tuple(parts), y, held_out, files)


def check_pixels(where: str, dtype: np.dtype) -> None:
    """Raise UsageError if numbers of this dtype are no pixels: of which it is known what is white."""
    if dtype.kind != "f" and (dtype.kind != "u" or dtype.itemsize > 2):
        raise UsageError(f"{where}: images are {dtype.name}; save them as uint8 (0 to 255), uint16, or floats (0 to 1)")


def check_scale(where: str, largest: float, dtype: np.dtype, darkest: float = 1 / 15) -> None:
    """Raise UsageError if ``largest``, the largest pixel of all regardless of its sign, tells that their scale is not
    that of their dtype: bytes as floats, 12 bits in uint16, masks of 0 and 1 in uint8. Standardized floats are fine."""
    white = 1 if dtype.kind == "f" else np.iinfo(dtype).max
    if not darkest * white <= largest <= _BRIGHTEST * white:
        raise UsageError(
            f"{where}: the largest pixel is {largest:g}, but white is {white} in images of {dtype.name}; divide the "
            "pixels by what is white in them, and save floats from 0 to 1"
        )


def _check_images(where: str, x: Part, before: list[Part]) -> None:
    shape, dtype = tuple(x.shape), np.dtype(x.dtype)
    if len(shape) not in (3, 4) or 0 in shape:
        raise UsageError(f"{where}: images of shape {shape}; save some as [n h w], or [n h w c] with c the channels")
    if len(shape) == 4 and shape[1] in (1, 3) and shape[2] == shape[3] > 4:
        raise UsageError(f"{where}: images of shape {shape} have channels first; save x.transpose(0, 2, 3, 1)")
    check_pixels(where, dtype)
    if before and (before[0].shape[1:], np.dtype(before[0].dtype)) != (shape[1:], dtype):
        raise UsageError(
            f"{where}: what is held out is {dtype.name} of shape {shape[1:]}, but what is learnt from "
            f"{np.dtype(before[0].dtype).name} of {tuple(before[0].shape[1:])}; save both alike"
        )


def _check_classes(where: str, images: int, y: np.ndarray, before: list[np.ndarray]) -> None:
    if y.shape != (images,):
        raise UsageError(f"{where}: {images} images, but classes of shape {y.shape}; each image has one class")
    if y.dtype.kind not in "iu":
        raise UsageError(f"{where}: classes are {y.dtype.name}; they must be whole numbers")
    if not before and images > 1 and y.min() == y.max():
        raise UsageError(f"{where}: all images are of class {y.min()}; give images of other classes, too")
    most = int(before[0].max()) if before else images - 1
    if y.min() < 0 or y.max() > most:
        why = "those learnt from end at" if before else f"{images} images can have no more than"
        raise UsageError(
            f"{where}: classes from {y.min()} to {y.max()}, but they are numbers from 0, and {why} {most}; number them "
            "anew, without gaps"
        )
