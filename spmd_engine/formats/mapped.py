"""An array that lies in a file as it is, so that it can be mapped instead of read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spmd_engine.foreign import reading


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
