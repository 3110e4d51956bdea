"""Arrays that live in an ``OffloadTarget``, and the stream of their pieces through memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.arrays.fused import alike
from spmd_engine.arrays.meta.meter import meter
from spmd_engine.engine.offload.target import OffloadTarget, pages


class OffloadedArray:
    """An array in an ``OffloadTarget``, in C order; zeros at first.

    Indexing, by slices only, makes a view and reads nothing; ``numpy.asarray`` reads, assignment writes. ``streamed``
    passes whole arrays through memory. In a dry run nothing is read or written but counted.
    """

    flags = SimpleNamespace(c_contiguous=True)

    def __init__(self, target: OffloadTarget, shape: Sequence[int], dtype: Any, backend: Backend) -> None:
        """Reserve the space, for zeros of the backend; raises OffloadError if there is none."""
        self.shape, self.dtype, self.backend, self.target = tuple(shape), np.dtype(dtype), backend, target
        self._offset = target.reserve(self.nbytes, zeros=True)  # place of the first element
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


# --- Offloaded arrays as a stream of pieces in memory


def streamed(sets: Sequence[Sequence[Array]]) -> Iterator[tuple[int, slice, list[Array]]]:
    """The flat arrays of each set in memory, as (number of the set, slice, elements of each array in it).

    Offloaded arrays come in pieces: the next piece is read, and the last one written, while the caller changes one.
    Arrays of one set have equal sizes and dtypes.
    """
    offloaded = {n: x for n, arrays in enumerate(sets) for x in arrays if isinstance(x, OffloadedArray)}  # one of each
    for number, arrays in enumerate(sets):
        if number not in offloaded:
            yield number, slice(None), [array.reshape(-1) for array in arrays]
        elif not offloaded[number].target.has_bytes:
            yield from _shapes(number, arrays, offloaded[number])
    pieces = iter([(n, part) for n, array in offloaded.items() if array.target.has_bytes for part in _slices(array)])
    loading: deque[tuple[int, slice, list[Any]]] = deque()
    storing: list[_Piece] = []
    while True:
        while len(loading) < 2 and (piece := next(pieces, None)):
            number, part = piece
            loading.append((number, part, [_piece_of(array, part) for array in sets[number]]))
        if not loading:
            break
        number, part, arrays = loading.popleft()
        yield number, part, [array.loaded() if isinstance(array, _Piece) else array for array in arrays]
        for array in storing:
            array.stored()
        storing = [array for array in arrays if isinstance(array, _Piece)]
        for array in storing:
            array.start_store()
    for array in storing:
        array.stored()
    for array in offloaded.values():
        array.target.buffers.clear()


def _slices(array: OffloadedArray) -> list[slice]:
    """The elements of an array in pieces."""
    step = array.target.piece // array.itemsize
    return [slice(first, min(first + step, array.size)) for first in range(0, array.size, step)]


def _piece_of(array: Array, part: slice) -> Any:
    return _Piece(array, part) if isinstance(array, OffloadedArray) else array.reshape(-1)[part]


class _Piece:
    """A piece of an array on its way from the target, in memory, or on its way back."""

    def __init__(self, array: OffloadedArray, part: slice) -> None:
        self._target, self._backend = array.target, array.backend
        size = (part.stop - part.start) * array.itemsize
        self._place = array.place + part.start * array.itemsize
        self._buffer = self._target.take_buffer()
        self._host = self._buffer[:size].view(array.dtype)
        self._bytes = self._buffer[: pages(size) if array.has_pages else size]
        self._moving = self._target.submit(self._target.transfer, self._place, self._bytes, writes=False)

    def loaded(self) -> Array:
        """The elements, once they are read."""
        self._moving.result()
        self._elements: Array = self._backend.asarray(self._host)
        return self._elements

    def start_store(self) -> None:
        """Begin to write the elements back; only when the piece before is stored, with which it may share a page."""
        if self._backend.on_device:
            self._host[...] = self._backend.to_host(self._elements)
        self._moving = self._target.submit(self._target.transfer, self._place, self._bytes, writes=True)

    def stored(self) -> None:
        """Wait until the elements are written."""
        self._moving.result()
        self._target.buffers.append(self._buffer)


def _shapes(number: int, arrays: Sequence[Array], one: OffloadedArray) -> Iterator[tuple[int, slice, list[Array]]]:
    """``streamed`` in a dry run: buffers of three pieces of each array, and the bytes that are read and written."""
    size, step, count = one.size, one.target.piece // one.itemsize, sum(isinstance(x, OffloadedArray) for x in arrays)
    buffers = [one.backend.empty(3 * min(step, size), one.dtype) for _ in range(count)]
    for first in alike(range(0, size, step), buffers[0], last=size % step != 0):
        part, free = slice(first, min(first + step, size)), iter(buffers)
        length = part.stop - part.start
        meter().transfer(length * count * one.itemsize, length * count * one.itemsize)
        in_memory = [
            next(free)[:length] if isinstance(array, OffloadedArray) else array.reshape(-1)[part] for array in arrays
        ]
        yield number, part, in_memory
