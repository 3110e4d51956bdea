"""Rectangles of a global array, and the grid that their edges form."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from math import prod
from operator import sub
from typing import NamedTuple

import numpy as np


class Rectangle(NamedTuple):
    """The elements of an array from ``start`` up to, and without, ``stop``, one number per dim.

    An array without dims is the rectangle ``Rectangle((), ())`` of one element. A rectangle may be empty.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def of(cls, index: Iterable[slice]) -> Rectangle:
        """The rectangle of ``array[index]``, whose slices have both a start and a stop."""
        index = tuple(index)
        return cls(tuple(int(part.start) for part in index), tuple(int(part.stop) for part in index))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Rectangle:
        """All of an array of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """The number of its elements."""
        return prod(map(sub, self.stop, self.start))

    @property
    def index(self) -> tuple[slice, ...]:
        """``array[rectangle.index]`` is this part of the array."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def __and__(self, other: Rectangle) -> Rectangle:
        """The elements that two rectangles share; empty if they share none."""
        start = tuple(map(max, self.start, other.start))
        return Rectangle(start, tuple(map(max, start, map(min, self.stop, other.stop))))

    def __sub__(self, other: Rectangle) -> list[Rectangle]:
        """The elements that are not in ``other``, as disjoint rectangles."""
        shared = self & other
        if not shared.size:
            return [self] if self.size else []
        rest, left = [], self
        for dim in range(len(self.start)):
            before = left._replace_dim(dim, left.start[dim], shared.start[dim])
            after = left._replace_dim(dim, shared.stop[dim], left.stop[dim])
            rest += [part for part in (before, after) if part.size]
            left = left._replace_dim(dim, shared.start[dim], shared.stop[dim])
        return rest

    def __contains__(self, other: Rectangle) -> bool:
        return not other.size or self & other == other

    def within(self, outer: Rectangle) -> Rectangle:
        """The same elements in the coordinates of ``outer``: their place in a block that is ``outer``."""
        return Rectangle(tuple(map(sub, self.start, outer.start)), tuple(map(sub, self.stop, outer.start)))

    def elements(self, first: int, last: int) -> Iterator[Rectangle]:
        """Its elements ``first`` up to, and without, ``last``, counted row by row, as rectangles in that order."""
        if first >= last:
            return
        if first == 0 and last == self.size:
            yield self
            return
        row = self.size // self.shape[0]
        rows, skipped = divmod(first, row)  # elements of the first row before ``first``
        if skipped:
            end = min(last, (rows + 1) * row)
            yield from self._row(rows, skipped, end - rows * row)
            first, rows = end, rows + 1
        if first < last:
            whole_rows = (last - first) // row
            if whole_rows:
                yield self._replace_dim(0, self.start[0] + rows, self.start[0] + rows + whole_rows)
            yield from self._row(rows + whole_rows, 0, last - first - whole_rows * row)

    def _row(self, number: int, first: int, last: int) -> Iterator[Rectangle]:
        """Elements ``first`` up to, and without, ``last`` of row ``number``."""
        for part in Rectangle(self.start[1:], self.stop[1:]).elements(first, last):
            at = self.start[0] + number
            yield Rectangle((at, *part.start), (at + 1, *part.stop))

    def _replace_dim(self, dim: int, start: int, stop: int) -> Rectangle:
        return Rectangle(
            (*self.start[:dim], start, *self.start[dim + 1 :]), (*self.stop[:dim], stop, *self.stop[dim + 1 :])
        )

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


def intersections(
    ones: Collection[Rectangle], others: Collection[Rectangle]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The intersections of ``ones`` with ``others``: start and stop[ones others dims], and size[ones others].

    An intersection may be empty. Each side has at least one rectangle.
    """
    one, other = (np.array([(part.start, part.stop) for part in side], np.int64) for side in (ones, others))
    start = np.maximum(one[:, None, 0], other[None, :, 0])
    stop = np.maximum(start, np.minimum(one[:, None, 1], other[None, :, 1]))
    return start, stop, (stop - start).prod(axis=-1)


def intersected(ones: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which rectangles share an element, bool[ones others]; each side has starts and stops, int[rectangles 2 dims]."""
    shared = np.ones((len(ones), len(others)), bool)
    for dim in range(ones.shape[2]):
        (start, stop), (begin, end) = ones[:, :, dim].T, others[:, :, dim].T
        shared &= np.maximum(start[:, None], begin) < np.minimum(stop[:, None], end)
    return shared


def covers_once(bounds: np.ndarray, shape: Sequence[int]) -> bool:
    """Whether rectangles within an array of this shape, with starts and stops ``bounds[rectangles 2 dims]``, have each
    of its elements exactly once.

    The number of rectangles that have an element changes at their corners alone, by 1 or -1 in turn. So it is 1
    everywhere if these changes add up to those of the whole array.
    """
    if not prod(shape):
        return True
    whole = np.array([[0] * len(shape), shape], np.int64)
    divided = (bounds != whole).any(axis=(0, 1))  # not the dims that every rectangle has whole
    bounds, whole = bounds[:, :, divided], whole[None, :, divided]
    dims = bounds.shape[2]
    if not dims:
        return len(bounds) == 1
    sides: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for corner in product((0, 1), repeat=dims):
        for rectangles, side in ((bounds, 0), (whole, 1)):
            sides[(side + sum(corner)) % 2].append(rectangles[:, corner, range(dims)])
    ups, downs = map(np.concatenate, sides)
    if dims == 1:  # faster than below, and most arrays are divided along one dim
        return bool((np.sort(ups, axis=0) == np.sort(downs, axis=0)).all())
    return bool((ups[np.lexsort(ups.T)] == downs[np.lexsort(downs.T)]).all())


class Grid:
    """An array split at every edge of some rectangles: a cell lies inside or outside each rectangle, never across."""

    def __init__(self, shape: Sequence[int], rectangles: Iterable[Rectangle]) -> None:
        bounds = Rectangle.whole(shape)
        edges = [{0, length} for length in shape]
        for rectangle in rectangles:
            if not rectangle.size:
                continue
            if rectangle not in bounds:
                raise ValueError(f"{rectangle} is not a part of an array of shape {tuple(shape)}")
            for dim, ends in enumerate(zip(rectangle.start, rectangle.stop, strict=True)):
                edges[dim].update(ends)
        self._edges = [sorted(positions) for positions in edges]
        self.shape = tuple(len(positions) - 1 for positions in self._edges)  #: in cells

    def cells(self, rectangle: Rectangle) -> tuple[slice, ...]:
        """The cells of a rectangle, which is one of those that the grid was made from."""
        return tuple(
            slice(bisect_left(edges, start), bisect_left(edges, stop))
            for edges, start, stop in zip(self._edges, rectangle.start, rectangle.stop, strict=True)
        )

    def sizes(self) -> np.ndarray:
        """The number of elements of each cell: an array of the grid's shape."""
        sizes = np.ones(self.shape, np.int64)
        for dim, edges in enumerate(self._edges):
            sizes *= np.diff(edges).reshape(-1, *(1,) * (len(self.shape) - dim - 1))
        return sizes

    def rectangles(self, mask: np.ndarray) -> list[Rectangle]:
        """The cells where ``mask``, of the grid's shape, is true: disjoint rectangles in order, neighbours joined."""
        cells = [Rectangle(tuple(at), tuple(n + 1 for n in at)) for at in np.argwhere(mask).tolist()]
        return [self._elements(block) for block in joined(cells)]

    def _elements(self, cells: Rectangle) -> Rectangle:
        ends = zip(self._edges, cells.start, cells.stop, strict=True)
        start, stop = zip(*((edges[a], edges[b]) for edges, a, b in ends), strict=True) if self._edges else ((), ())
        return Rectangle(start, stop)


def joined(rectangles: Iterable[Rectangle]) -> list[Rectangle]:
    """Disjoint rectangles with neighbours joined, along the last dim first: few and long rectangles, in order."""
    merged = sorted(rectangles)
    for dim in reversed(range(len(merged[0].start) if merged else 0)):
        open_ended: dict[tuple, Rectangle] = {}  # by where it ends along this dim, and its ends along the others
        for part in sorted(merged, key=lambda part: part.start[dim]):
            across = (*part.start[:dim], *part.start[dim + 1 :]), (*part.stop[:dim], *part.stop[dim + 1 :])
            before = open_ended.pop((part.start[dim], across), part)
            open_ended[part.stop[dim], across] = Rectangle(before.start, part.stop)
        merged = sorted(open_ended.values())
    return merged
