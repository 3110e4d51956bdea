"""Offloaded arrays as a stream of pieces in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.fused import alike
from spmd_engine.arrays.meta.meter import meter
from spmd_engine.engine.offload.array import OffloadedArray
from spmd_engine.engine.offload.target import pages


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
