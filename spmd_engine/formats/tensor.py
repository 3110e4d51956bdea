"""Tensors in files: each has a known shape, and any rectangle of it can be read without the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import reading
from spmd_engine.formats.safetensors_header import dtype_named

Index = Sequence[slice | int]


@dataclass(frozen=True)
class FileTensor(ABC):
    """The place and format of a tensor in a file, as plain values."""

    name: str
    path: str  #: the file's
    shape: tuple[int, ...]
    dtype: str  #: its name in the file format: BF16, Q8_0, ...
    offset: int  #: bytes from the file's beginning

    @abstractmethod
    def read(self, split: Sequence[Sequence[int]], index: Index) -> np.ndarray:
        """Read a rectangle. For each dim, ``split`` has the sizes of the dims that it is reshaped into; ``index`` has
        an index for each of these.

        Plain tensors keep their dtype; packed ones become float32. The result may be a read-only view of the file.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes of the tensor in the file."""

    def check_weights(self) -> None:
        """Raise CheckpointError if its dtype is not supported for weights."""

    def rows(self, begin: int, end: int) -> FileTensor:
        """The rows from ``begin`` to ``end`` - 1, as a tensor."""
        length = self.nbytes // max(1, self.shape[0])
        return replace(self, shape=(end - begin, *self.shape[1:]), offset=self.offset + begin * length)

    def check_sizes(self, split: Sequence[Sequence[int]]) -> None:
        """Raise CheckpointError unless each dim has the size that ``split`` expects."""
        expected = tuple(prod(sizes) for sizes in split)
        if expected != self.shape:
            raise CheckpointError(
                f"{self.path}: {self.name} is {list(self.shape)}, but the model's configuration says {list(expected)}"
            )


@dataclass(frozen=True)
class PlainTensor(FileTensor):
    """A tensor that is stored unpacked, in C order; ``numpy`` is the name of its dtype in NumPy."""

    numpy: str

    def read(self, split: Sequence[Sequence[int]], index: Index) -> np.ndarray:
        tensor = MappedArray(self.path, self.numpy, self.offset, self.shape or (1,)).open()
        part = tensor.reshape([size for sizes in split for size in sizes])[tuple(index)]
        return np.asarray(part)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtype_named(self.numpy).itemsize

    def check_weights(self) -> None:
        if self.numpy not in ("float64", "float32", "float16", "bfloat16"):
            raise CheckpointError(f"{self.path}: {self.name} is of dtype {self.dtype}; no weights are read of that")


# --- Arrays that can be mapped instead of read


@dataclass(frozen=True)
class MappedArray:
    """The place of an array in C order in a file, as plain values, so that another rank can open it."""

    path: str
    dtype: str  #: the name in NumPy, perhaps with the byte order (">f4"), or in ml_dtypes
    offset: int  #: bytes before the array
    shape: tuple[int, ...]

    def open(self) -> np.ndarray:
        """Map the array, so that only the pages in use are read. Raises UsageError if the file cannot be opened."""
        if 0 in self.shape:  # an empty array cannot be mapped
            return np.empty(self.shape, dtype_named(self.dtype))
        with reading(f"{self.path} cannot be opened", "; every rank must see it by this name"):
            return np.memmap(self.path, dtype_named(self.dtype), "r", self.offset, tuple(self.shape))
