"""Labelled images: rank 0 finds and checks them, all ranks map or share them and augment them at random."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.arrays.precision import dtype_of
from spmd_engine.arrays.random import integers, key_of
from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero, on_all_ranks, on_rank_zero, share_array
from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError
from spmd_engine.foreign import first_few, reading, refuse_pointer
from spmd_engine.formats.array_files import is_of_arrays, npz_names, read_idx, read_npz
from spmd_engine.formats.image_files import (
    ImageFiles,
    LabelledImages,
    images_in_folder,
    images_in_table,
    is_table,
    pictures_at,
)
from spmd_engine.formats.parquet_images import MAGIC, ParquetRows, parquet_files, read_parquet_images
from spmd_engine.formats.tensor import MappedArray
from spmd_engine.models import ImageShape
from spmd_engine.training.data.array_data import ArrayData, part_of

HELD_OUT = 5  #: one image of this many is for validation, equally in all runs, if the data have no part for that
#: Names in an .npz file of images and their classes, then of held-out ones.
NPZ_NAMES = (
    (("x", "y"),),
    (("images", "labels"),),
    (("x_train", "y_train"), ("x_test", "y_test")),
    (("train_images", "train_labels"), ("test_images", "test_labels")),
)
#: Names of IDX files in a folder: those of MNIST, with .gz or without.
IDX_NAMES = (("train-images*", "train-labels*"), ("t10k-images*", "t10k-labels*"))
_ZIP = b"PK"  # how an .npz begins
_BRIGHTEST = 10  #: the largest float, in multiples of white: with mean 0 and variance 1, pixels reach a few
_KNOWN = (
    "a folder of IDX files (train-images-idx3-ubyte, train-labels-idx1-ubyte, ...), an .npz file of arrays x and y, "
    "a folder with a subfolder of images a class, a .csv file of paths and labels, or .parquet files"
)

Part = MappedArray | ImageFiles | ParquetRows | np.ndarray  #: images [n h w] or [n h w c]


def find_images(path: str | None) -> Images:
    """The images of a file or a folder, without a digest; None: scikit-learn's digits. Raises UsageError, naming the
    file."""
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
        if files := parquet_files(root):
            return _parquet(files)
        return _image_files(root, images_in_folder(root))
    content = _beginning(root)
    if content.startswith(_ZIP):
        return _npz(root)
    if content.startswith(MAGIC):
        return _parquet([root])
    refuse_pointer(root)
    if is_table(root):
        return _image_files(root, images_in_table(root))
    raise UsageError(f"--data {root}: not images in a format known here: {_KNOWN}")


def find_unlabelled(path: Path, channels: int) -> tuple[ImageRows, list[str]]:
    """Images for a model of so many channels, whatever their classes: one in a file, those of a folder and its
    subfolders in the order of their paths, or those of a data set; and notes on what is not read. Raises UsageError."""
    if path.is_dir():
        is_data_set = any(path.glob(IDX_NAMES[0][0])) or bool(parquet_files(path))
    else:
        is_data_set = is_table(path) or _beginning(path).startswith((_ZIP, MAGIC))
    if is_data_set:
        source = find_images(str(path))
        return source.x, [*source.notes]
    files, notes = pictures_at(path, channels)
    _check_images(str(path), files, [])
    return ImageRows([files]), notes


def _beginning(path: Path) -> bytes:
    with reading(f"{path} cannot be read"), path.open("rb") as file:
        return file.read(len(MAGIC))


def _digits() -> Images:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 pixels from 0 to 16: read from its file, since its import takes
    seconds."""
    spec = find_spec("sklearn")
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz" if spec and spec.origin else None
    if file is None or not file.exists():
        raise UsageError(
            "without --data, images are scikit-learn's digits, and scikit-learn is not installed: "
            f"pip install 'spmd_engine[images]', or give --data PATH: {_KNOWN}"
        )
    with gzip.open(file, "rt") as lines:
        table = np.loadtxt(lines, np.float32, delimiter=",")
    return _check_sources([(str(file), table[:, :-1].reshape(-1, 8, 8) / 16, table[:, -1].astype(np.int64))], 1)


def _image_files(where: Path, found: LabelledImages) -> Images:
    sources = [(str(where), files, y) for files, y in found.parts]
    return _check_sources(sources, sum(len(y) for _, y in found.parts), found.names, found.notes)


def _parquet(files: Sequence[Path]) -> Images:
    found = read_parquet_images(files)
    return _check_sources(found.parts, found.files, found.names, found.notes)


def _idx(folder: Path) -> Images:
    parts: list[tuple[str, Part, np.ndarray]] = []
    read = set()
    for patterns in IDX_NAMES:
        # The least is not the .gz file, if both exist.
        images, labels = (min(folder.glob(pattern), default=None) for pattern in patterns)
        if images is None and labels is None:
            continue
        if images is None or labels is None:
            raise UsageError(f"--data {folder}: {patterns[0]} and {patterns[1]} go together, and one is missing")
        parts.append((str(images), read_idx(images), _load(read_idx(labels))))
        read |= {images, labels}
    others = [path.name for path in sorted(folder.iterdir()) if path not in read]
    notes = [f"{len(others):,} left out: beside the files that are read ({first_few(others)})"] if others else []
    return _check_sources(parts, 2 * len(parts), notes=notes)


def _npz(file: Path) -> Images:
    names = set(npz_names(file))
    for pairs in NPZ_NAMES:
        if names.issuperset(pairs[0]):
            present = [pair for pair in pairs if names.intersection(pair)]
            if missing := sorted({name for pair in present for name in pair} - names):
                raise UsageError(f"--data {file}: it has no {missing[0]}, which is needed with its held-out arrays")
            unread = sorted(names - {name for pair in present for name in pair})
            notes = [f"arrays that are not read: {first_few(unread)}"] if unread else []
            parts = [(str(file), read_npz(file, x), _load(read_npz(file, y))) for x, y in present]
            return _check_sources(parts, 1, notes=notes)
    if not is_of_arrays(file):
        raise UsageError(f"--data {file}: it is a zip file, but no .npz file of arrays; unpack it, and name the folder")
    raise UsageError(
        f"--data {file}: it has the arrays {', '.join(sorted(names)) or 'none'}; call images x and their classes y (or "
        "images and labels, or x_train, y_train, x_test, y_test)"
    )


def _load(array: MappedArray | np.ndarray) -> np.ndarray:
    return np.array(array.open() if isinstance(array, MappedArray) else array)


def _check_sources(
    sources: Sequence[tuple[str, Part, np.ndarray]], files: int, names: Sequence[str] = (), notes: Sequence[str] = ()
) -> Images:
    """Images of parts, which come with their places and classes; a second part is held out."""
    parts, classes = [], []
    for where, x, y in sources:
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        _check_images(where, x, parts)
        _check_classes(where, x.shape[0], y, classes)
        parts.append(x)
        classes.append(y.astype(np.int64))
    y = np.concatenate(classes)
    held_out = np.arange(len(classes[0]), len(y)) if len(parts) > 1 else part_of(len(y), -(-len(y) // HELD_OUT), 0)
    if not 0 < len(held_out) < len(y):
        raise UsageError(f"--data {sources[0][0]}: {len(y)} images, too few to train on some and hold out others")
    return Images(ImageRows(parts), y, held_out, files, "", names, notes)


def check_pixels(where: str, dtype: np.dtype) -> None:
    """Raise UsageError if this dtype is not one of pixels, which has a known value of white."""
    if dtype.kind != "f" and (dtype.kind != "u" or dtype.itemsize > 2):
        raise UsageError(f"{where}: images are {dtype.name}; save them as uint8 (0 to 255), uint16, or floats (0 to 1)")


def check_scale(where: str, largest: float, dtype: np.dtype, darkest: float = 1 / 15) -> None:
    """Raise UsageError if ``largest``, the largest absolute pixel, does not fit the scale of the dtype: bytes as
    floats, 12 bits in uint16, masks of 0 and 1 in uint8. Standardized floats are fine."""
    white = 1 if dtype.kind == "f" else np.iinfo(dtype).max
    if not darkest * white <= largest <= _BRIGHTEST * white:
        raise UsageError(
            f"{where}: the largest pixel is {largest:g}, but white is {white} in images of {dtype.name}; divide the "
            "pixels by their value of white, and save floats from 0 to 1"
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
            f"{where}: held-out images are {dtype.name} of shape {shape[1:]}, but training images are "
            f"{np.dtype(before[0].dtype).name} of {tuple(before[0].shape[1:])}; save both in one format"
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


# --- Training images, shared among the ranks, which read only their own samples


_MOST_BYTES = 1 << 24  # size of the images that the digest reads at once


class ImageRows:
    """Images[n h w c] of several arrays, one after the other, read by numbers or slices of n."""

    def __init__(self, sources: Sequence[Part]) -> None:
        self.sources = sources
        opened: list[Any] = [part if isinstance(part, np.ndarray) else part.open() for part in sources]
        self.parts = [part[..., None] if len(part.shape) == 3 else part for part in opened]  # grey: one channel
        self._starts = np.cumsum([0, *map(len, self.parts)])
        self.shape = (int(self._starts[-1]), *self.parts[0].shape[1:])
        self.dtype = self.parts[0].dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, numbers: slice | np.ndarray) -> np.ndarray:
        numbers = np.arange(*numbers.indices(len(self))) if isinstance(numbers, slice) else numbers
        rows = np.empty((len(numbers), *self.shape[1:]), self.dtype)
        for start, part in zip(self._starts, self.parts, strict=False):
            in_part = (numbers >= start) & (numbers < start + len(part))
            if in_part.any():
                rows[in_part] = part[numbers[in_part] - start]
        return rows


@dataclass(frozen=True)
class Images:
    """Images[n h w c], their classes, and the number and digest of their files: equal on every rank."""

    x: ImageRows
    y: np.ndarray  #: int64[n]
    held_out: np.ndarray  #: numbers of the images for validation
    files: int
    sha256: str  #: digest of pixels, classes and held-out numbers, whatever the format; "" if it is not made yet
    names: Sequence[str] = ()  #: names of the classes, if they have any
    notes: Sequence[str] = ()  #: what is not read

    @property
    def shape(self) -> ImageShape:
        """The sizes that a model of these images is built for."""
        _, height, width, channels = self.x.shape
        return ImageShape(height, width, channels, int(self.y.max()) + 1)

    def __str__(self) -> str:
        held_out = len(self.held_out)
        return "; ".join([f"{len(self.y) - held_out:,} {self.shape}, {held_out:,} more held out", *self.notes])


@checked()
def load_images(group: Group, path: str | None) -> Images:
    """The images of a file or a folder; None: scikit-learn's digits. Collective.

    Rank 0 finds and checks them. Every rank maps uncompressed IDX and .npz files, and opens pictures of a folder or of
    parquet files when it needs them, so that a rank reads only its own samples; compressed files are shared, one copy
    for each node.
    Raises the same UsageError on every rank for data that are missing, damaged or invalid.
    """
    source: Any = on_rank_zero(group, lambda: find_images(path))  # None on other ranks
    facts = json_from_rank_zero(group, lambda: _describe(source, path or "the digits"))
    shared = []
    for number, part_facts in enumerate(facts["parts"]):
        parts = [source.x.sources[number]] if source and not part_facts else None
        shared.append(_part_from_json(part_facts) if part_facts else share_array(group, parts, label="images"))
    y = group.broadcast(source.y if source else None, group.lowest, label="images")
    held_out = group.broadcast(source.held_out if source else None, group.lowest, label="images")
    x = on_all_ranks(group, lambda: ImageRows(shared))
    return Images(x, y, held_out, *(facts[name] for name in ("files", "sha256", "names", "notes")))


def _describe(source: Images, where: str) -> dict[str, Any]:
    """What rank 0 found in JSON, without its arrays; all images are read once, for the digest."""
    parts = [None if isinstance(part, np.ndarray) else asdict(part) for part in source.x.sources]
    sha256 = _digest(source.x, source.y, source.held_out, where)
    texts = {"names": list(source.names), "notes": list(source.notes)}
    return {"parts": parts, "files": source.files, "sha256": sha256, **texts}


def _part_from_json(part_facts: dict[str, Any]) -> MappedArray | ImageFiles | ParquetRows:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in part_facts.items()
    }
    kind = MappedArray if "offset" in values else ParquetRows if "groups" in values else ImageFiles
    return kind(**values)


def _digest(x: ImageRows, y: np.ndarray, held_out: np.ndarray, where: str) -> str:
    """SHA-256 of images, classes and held-out numbers. Raises UsageError for pixels that are not finite, and for
    another scale than that of their dtype."""
    digest = hashlib.sha256(f"{x.dtype.name}{x.shape}".encode())
    largest = 0.0
    at_once = max(1, _MOST_BYTES // max(1, x.dtype.itemsize * int(np.prod(x.shape[1:]))))
    for first in range(0, len(x), at_once):
        images = x[first : first + at_once]
        if images.dtype.kind == "f" and not (finite := np.isfinite(images).all(axis=(1, 2, 3))).all():
            number = first + finite.argmin()
            raise UsageError(f"{where}: image {number}, counted from 0, has pixels that are not finite")
        largest = max(largest, float(images.max()), -float(images.min()))
        digest.update(images.astype(x.dtype.newbyteorder("="), copy=False).tobytes())
    check_scale(where, largest, x.dtype)
    digest.update(y.astype("<i8").tobytes() + held_out.astype("<i8").tobytes())
    return digest.hexdigest()


class ImageData(ArrayData):
    """Images as samples x[b h w c], floats of ``dtype`` from 0 to 1, with their classes y[b], in shuffled epochs.

    Training images are changed at random by ``augment`` (see ``augmented``), differently in each epoch; validation
    images never are. Order and changes depend only on the seed and a sample's place in all epochs.
    """

    def __init__(self, images: Images, *, dtype: Any = np.float32, augment: str = "none", seed: int = 0) -> None:
        super().__init__(images.x, images.y, validation=images.held_out, seed=seed)
        self.dtype, self.augment = dtype_of(dtype), augment

    def examples(self, numbers: np.ndarray, held_out: bool = False) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().examples(numbers, held_out)
        x = as_floats(x, self.dtype)
        return x if held_out else augmented(x, numbers, self.seed, self.augment), y


def as_floats(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Pixels as a model takes them, from 0 to 1: unsigned whole numbers are divided by the largest of their dtype.

    Floats are not scaled. Raises UsageError for all other dtypes, whose value of white is unknown.
    """
    check_pixels("pixels", x.dtype)
    dtype = dtype_of(dtype)
    if x.dtype.kind == "f":
        return x.astype(dtype)
    return x.astype(dtype) / dtype.type(np.iinfo(x.dtype).max)


# --- Random shifts and mirrorings of images, as functions of a seed and a place alone


def augmented(x: np.ndarray, places: np.ndarray, seed: int, how: str) -> np.ndarray:
    """Images[b h w c], each changed by its place in all epochs: equally on any mesh, and after any resume.

    ``shift`` moves an image by up to an eighth of its height and width, all directions and amounts being equally
    likely, and fills with 0; ``shift-flip`` also mirrors half of them, left to right; ``none`` changes nothing.
    """
    if how == "none":
        return x
    x = shifted(x, *(_offsets(seed, dim, length, places) for dim, length in zip("hw", x.shape[1:3], strict=True)))
    if how == "shift-flip":
        mirrored = integers(key_of(seed, "flip"), 2, places) == 1
        x[mirrored] = x[mirrored, :, ::-1]
    return x


def shifted(x: np.ndarray, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Images[b h w c], each moved by its own numbers of pixels, down[b] and right[b], and filled with 0."""
    _, height, width, _ = x.shape
    rows = np.arange(height) - down[:, None]  # b h: the source of each row
    columns = np.arange(width) - right[:, None]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    samples = np.arange(len(x))[:, None, None]
    taken = x[samples, (rows % height)[:, :, None], (columns % width)[:, None, :]]
    return np.where(inside[..., None], taken, x.dtype.type(0))


def _offsets(seed: int, dim: str, length: int, places: np.ndarray) -> np.ndarray:
    most = length // 8
    return integers(key_of(seed, "shift", dim), 2 * most + 1, places) - most
