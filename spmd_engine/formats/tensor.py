"""A tensor in somebody's file: its sizes are known, and any rectangle of it can be read without the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import reading

Index = Sequence[slice | int]


@dataclass(frozen=True)
class FileTensor(ABC):
    """Where a tensor lies, and as what; plain values."""

    name: str
    path: str  #: of the file
    shape: tuple[int, ...]
    dtype: str  #: as its format calls it: BF16, Q8_0, ...
    offset: int  #: bytes from the file's beginning

    @abstractmethod
    def read(self, split: Sequence[Sequence[int]], index: Index) -> np.ndarray:
        """A rectangle: each dim seen as several (``split``, of which it is the product), with an ``index`` for each.

        Plain ones come in their own dtype, packed ones as float32. It may be a view of the file, not to be written to.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """In the file."""

    def check_weights(self) -> None:
        """Raise CheckpointError if its dtype is not one of weights."""

    def rows(self, begin: int, end: int) -> FileTensor:
        """These of its rows, as a tensor of its own."""
        length = self.nbytes // max(1, self.shape[0])
        return replace(self, shape=(end - begin, *self.shape[1:]), offset=self.offset + begin * length)

    def of_sizes(self, split: Sequence[Sequence[int]]) -> None:
        """Raise CheckpointError unless each dim is as large as its parts say."""
        expected = tuple(prod(sizes) for sizes in split)
        if expected != self.shape:
            raise CheckpointError(
                f"{self.path}: {self.name} is {list(self.shape)}, but the model's configuration says {list(expected)}"
            )


@dataclass(frozen=True)
class PlainTensor(FileTensor):
    """One that is stored as it is, in C order; ``numpy`` is its dtype's name there."""

    numpy: str

    def read(self, split: Sequence[Sequence[int]], index: Index) -> np.ndarray:
        whole = MappedArray(self.path, _known(self.numpy), self.offset, self.shape or (1,)).open()
        part = whole.reshape([size for sizes in split for size in sizes])[tuple(index)]
        return np.asarray(part)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(_known(self.numpy)).itemsize

    def check_weights(self) -> None:
        if self.numpy not in ("float64", "float32", "float16", "bfloat16"):
            raise CheckpointError(f"{self.path}: {self.name} is of dtype {self.dtype}; no weights are read of that")


def _known(name: str) -> str:
    """A dtype's name that NumPy knows; bfloat16 it learns from ml_dtypes, which takes longer to load than all here."""
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401
    return name


# --- An array that lies in a file as it is, so that it can be mapped instead of read


@dataclass(frozen=True)
class MappedArray:
    """Where an array in C order lies in a file. Plain values: another rank can open it by them."""

    path: str
    dtype: str  #: as NumPy writes it, byte order included: ">f4"
    offset: int  #: bytes before it
    shape: tuple[int, ...]

    def open(self) -> np.ndarray:
        """The array, mapped: only what is looked at is read. Raises UsageError if the file cannot be opened."""
        if 0 in self.shape:  # nothing cannot be mapped
            return np.empty(self.shape, self.dtype)
        with reading(f"{self.path} cannot be opened", "; every rank must see it by this name"):
            return np.memmap(self.path, self.dtype, "r", self.offset, tuple(self.shape))
