"""Arrays without memory: what code that only moves and cuts arrays can be run on to see what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class ShapedArray:
    """A shape and a dtype. Parts can be taken and shapes changed as of any array; what is written is forgotten."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self._like = np.broadcast_to(np.zeros((), dtype), tuple(shape))  # one number, whatever the shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._like.shape

    @property
    def dtype(self) -> np.dtype:
        return self._like.dtype

    @property
    def ndim(self) -> int:
        return self._like.ndim

    @property
    def size(self) -> int:
        return self._like.size

    @property
    def nbytes(self) -> int:
        return self._like.size * self._like.itemsize

    def __len__(self) -> int:
        return len(self._like)

    def __getitem__(self, index: Any) -> ShapedArray:
        return ShapedArray(self._like[index].shape, self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Nothing is kept."""

    def __iadd__(self, other: Any) -> ShapedArray:
        return self

    def reshape(self, *shape: int | Sequence[int]) -> ShapedArray:
        return ShapedArray(self._like.reshape(*shape).shape, self.dtype)

    def astype(self, dtype: Any) -> ShapedArray:
        return ShapedArray(self.shape, dtype)

    def __repr__(self) -> str:
        return f"ShapedArray({list(self.shape)}, {self.dtype})"
