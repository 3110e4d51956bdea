"""Images to learn from: shared among the ranks, each of which reads its own samples alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from spmd_engine.comm.agreement.rank_zero import on_all_ranks, on_rank_zero, share_array, text_from_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError
from spmd_engine.formats import ImageFiles, MappedArray
from spmd_engine.models import ImageShape
from spmd_engine.training.data.array_data import ArrayData
from spmd_engine.training.data.augment import augmented
from spmd_engine.training.data.image_sources import ImageSource, Part, check_pixels, check_scale, find_images

_MOST_BYTES = 1 << 24  # of images that the digest looks at together


class ImageRows:
    """Images[n h w c] that lie in several places, one after the other: read by numbers or slices of n."""

    def __init__(self, parts: Sequence[Part]) -> None:
        opened = [part if isinstance(part, np.ndarray) else part.open() for part in parts]
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
            here = (numbers >= start) & (numbers < start + len(part))
            if here.any():
                rows[here] = part[numbers[here] - start]
        return rows


@dataclass(frozen=True)
class Images:
    """Images[n h w c], the class of each, and what they were read from: the same on every rank."""

    x: ImageRows
    y: np.ndarray  #: int64[n]
    held_out: np.ndarray  #: numbers of those to validate on
    files: int
    sha256: str  #: of pixels, classes, and what is held out: the same images in another format have the same

    @property
    def shape(self) -> ImageShape:
        """What a model of them is built for."""
        return ImageShape(*self.x.shape[1:], int(self.y.max()) + 1)

    def __str__(self) -> str:
        held_out = len(self.held_out)
        return f"{len(self.y) - held_out:,} {self.shape}, {held_out:,} more held out"


def load_images(group: Group, path: str | None) -> Images:
    """The images of a file or a folder; None: scikit-learn's digits. Collective.

    Rank 0 finds and checks them. What lies in files as it is (IDX and .npz that are not compressed) every rank maps,
    and pictures of a folder are opened when they are wanted, so that a rank reads its own samples alone; what is
    compressed is shared, one copy a node. Raises the same UsageError on every rank for what is missing, damaged or
    makes no sense.
    """
    found = on_rank_zero(group, lambda: find_images(path))
    said = json.loads(text_from_rank_zero(group, lambda: json.dumps(_described(found, path or "the digits"))))
    shared = []
    for number, described in enumerate(said["parts"]):
        parts = [found.parts[number]] if found and not described else None
        shared.append(_part(described) if described else share_array(group, parts, label="images"))
    y = group.broadcast(found.y if found else None, label="images")
    held_out = group.broadcast(found.held_out if found else None, label="images")
    return Images(on_all_ranks(group, lambda: ImageRows(shared)), y, held_out, said["files"], said["sha256"])


def _described(found: ImageSource, where: str) -> dict[str, Any]:
    """A source in JSON, without its arrays; all images are read once, for the digest."""
    parts = [None if isinstance(part, np.ndarray) else asdict(part) for part in found.parts]
    sha256 = _digest(ImageRows(found.parts), found.y, found.held_out, where)
    return {"parts": parts, "files": found.files, "sha256": sha256}


def _part(described: dict[str, Any]) -> MappedArray | ImageFiles:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in described.items()}
    return (MappedArray if "offset" in values else ImageFiles)(**values)


def _digest(x: ImageRows, y: np.ndarray, held_out: np.ndarray, where: str) -> str:
    """SHA-256 of them. Raises UsageError for an image with a number that is not finite, and for another scale than
    that of their dtype."""
    digest = hashlib.sha256(f"{x.dtype.name}{x.shape}".encode())
    largest = 0.0
    at_once = max(1, _MOST_BYTES // max(1, x.dtype.itemsize * int(np.prod(x.shape[1:]))))
    for first in range(0, len(x), at_once):
        some = x[first : first + at_once]
        if some.dtype.kind == "f" and not (finite := np.isfinite(some).all(axis=(1, 2, 3))).all():
            number = first + finite.argmin()
            raise UsageError(f"{where}: image {number}, counted from 0, has pixels that are not finite")
        largest = max(largest, float(some.max()), -float(some.min()))
        digest.update(some.astype(x.dtype.newbyteorder("="), copy=False).tobytes())
    check_scale(where, largest, x.dtype)
    digest.update(y.astype("<i8").tobytes() + held_out.astype("<i8").tobytes())
    return digest.hexdigest()


class ImageData(ArrayData):
    """Images as samples x[b h w c], floats of ``dtype`` from 0 to 1, with their classes y[b], in shuffled epochs.

    Those to learn from are changed at random as ``augment`` says (one of ``AUGMENT``), each time in another way; those
    to validate on never are. Both follow from the seed and a sample's place in all epochs alone.
    """

    def __init__(self, images: Images, *, dtype: Any = np.float32, augment: str = "none", seed: int = 0) -> None:
        super().__init__(images.x, images.y, validation=images.held_out, seed=seed)
        self.dtype, self.augment = np.dtype(dtype), augment

    def examples(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().examples(places)
        return augmented(x, places, self.seed, self.augment), y

    def _rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, y = super()._rows(numbers)
        return as_floats(x, self.dtype), y


def as_floats(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Pixels as a model takes them: from 0 to 1, unsigned whole numbers being divided by the largest of their dtype.

    Floats are taken as they are. Raises UsageError for all other numbers, of which nobody knows the largest.
    """
    check_pixels("pixels", x.dtype)
    dtype = np.dtype(dtype)
    if x.dtype.kind == "f":
        return x.astype(dtype)
    return x.astype(dtype) / dtype.type(np.iinfo(x.dtype).max)
