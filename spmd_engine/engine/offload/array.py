"""Arrays that live in an ``OffloadTarget``."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.engine.offload.target import OffloadTarget


class OffloadedArray:
    """An array in an ``OffloadTarget``, in C order; zeros at first.

    Indexing, by slices only, makes a view and reads nothing; ``numpy.asarray`` reads, assignment writes. ``streamed``
    passes whole arrays through memory. In a dry run nothing is read or written but counted.
    """

    flags = SimpleNamespace(c_contiguous=True)

    def __init__(self, target: OffloadTarget, shape: Sequence[int], dtype: Any, backend: Backend) -> None:
        """Reserve the space, for zeros of the backend; raises OffloadError if there is none."""
        self.shape, self.dtype, self.backend, self.target = tuple(shape), np.dtype(dtype), backend, target
        self._offset = target.reserve(self.nbytes, zeros=True)  # of the first element
        self._first = 0  # elements before this view's first row
        self._inside: tuple[slice, ...] | None = None  # the part of each row; None: all
        self._row_shape = self.shape[1:]
        self.has_pages = True  #: whether no other elements are in its pages

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: prod(self.shape))
    itemsize = property(lambda self: self.dtype.itemsize)
    nbytes = property(lambda self: self.size * self.dtype.itemsize)
    #: bytes before the first element in the target
    place = property(lambda self: self._offset + self._first * self.itemsize)

    def __len__(self) -> int:
        return self.shape[0]

    def _view(self, first: int, shape: tuple[int, ...], row: tuple[int, ...], inside: Any = None) -> OffloadedArray:
        view = OffloadedArray.__new__(OffloadedArray)
        vars(view).update(vars(self), _first=first, shape=shape, _row_shape=row, _inside=inside)
        view.has_pages = self.has_pages and view.size == self.size
        return view

    def reshape(self, *shape: Any) -> OffloadedArray:
        """A view in another shape of whole rows."""
        sizes = tuple(shape[0]) if isinstance(shape[0], tuple) else shape
        if -1 in sizes:
            sizes = tuple(self.size // -prod(sizes) if n == -1 else n for n in sizes)
        if self._inside is not None or prod(sizes) != self.size:
            raise ValueError(f"an array of shape {self.shape} cannot be viewed in shape {sizes}")
        return self._view(self._first, sizes, sizes[1:])

    def __getitem__(self, index: Any) -> OffloadedArray:
        parts = [part for part in (index if isinstance(index, tuple) else (index,)) if part is not Ellipsis]
        if not parts or not self.shape:
            return self
        spans = [slice(*part.indices(n)[:2]) for part, n in zip(parts, self.shape, strict=False)]
        spans += [slice(0, n) for n in self.shape[len(spans) :]]
        before = self._inside or tuple(slice(0, n) for n in self._row_shape)
        inside = tuple(slice(a.start + b.start, a.start + b.stop) for a, b in zip(before, spans[1:], strict=True))
        whole = all((a.start, a.stop) == (0, n) for a, n in zip(inside, self._row_shape, strict=True))
        first = self._first + spans[0].start * prod(self._row_shape)
        shape = tuple(max(0, span.stop - span.start) for span in spans)
        return self._view(first, shape, self._row_shape, None if whole else inside)

    def _rows(self) -> np.ndarray:
        """The whole rows of this view, read from the target."""
        return self.target.read_all(self.place, np.empty((*self.shape[:1], *self._row_shape), self.dtype))

    def _part(self, rows: np.ndarray) -> np.ndarray:
        return rows if self._inside is None else rows[(slice(None), *self._inside)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._part(self._rows()).astype(dtype or self.dtype, copy=False)

    def __setitem__(self, index: Any, value: Any) -> None:
        view = self[index]
        if not view.size:
            return
        whole = view._inside is None
        rows = np.empty((*view.shape[:1], *view._row_shape), view.dtype) if whole else view._rows()
        view._part(rows)[...] = backend_of(value).to_host(value)
        self.target.transfer(view.place, rows.reshape(-1).view(np.uint8), writes=True)

    def __iadd__(self, x: Any) -> OffloadedArray:
        self[...] = np.asarray(self) + x
        return self

    def start_read(self, into: Array) -> Future[Array]:
        """Begin to fill a contiguous array of this shape on the host; the result is the array."""
        return self.target.start_read(self.place, into)
