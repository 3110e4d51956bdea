"""Which rectangles of which global arrays each rank has: pure functions of coordinates, no communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import chain
from typing import Any

import numpy as np

from spmd_engine.arrays.dtypes import describe, described
from spmd_engine.axes import MeshPosition
from spmd_engine.comm import Group
from spmd_engine.comm.agreement.rank_zero import gather_equal_json, of_equal_ranks
from spmd_engine.comm.agreement.signature import number_of
from spmd_engine.comm.notation import Spec
from spmd_engine.errors import UsageError
from spmd_engine.sharding.rectangles import Grid, Rectangle, covers_once

Rectangles = tuple[Rectangle, ...]
Interval = tuple[int, int]  # start and stop along a dim


class OneEach(Sequence[Rectangles]):
    """The rectangles of ranks that have at most one each, as numbers: ``Rectangle`` objects are made when needed.

    ``bounds[ranks 2 dims]`` are starts and stops; ``present[ranks]``: whether a rank has a rectangle.
    """

    def __init__(self, bounds: np.ndarray, present: np.ndarray) -> None:
        self.bounds, self.present = bounds, present

    @cached_property
    def numbers(self) -> np.ndarray:
        """The first rank with the same rectangle, for each rank; -1 if it has none, or an empty one."""
        filled = np.flatnonzero(self.present & (self.bounds[:, 1] > self.bounds[:, 0]).all(axis=1))
        first: dict[bytes, int] = {}
        rows = zip(self.bounds[filled], filled.tolist(), strict=True)
        numbers = np.full(len(self), -1)
        numbers[filled] = [first.setdefault(row.tobytes(), rank) for row, rank in rows]
        return numbers

    def first_holders(self, shape: Sequence[int]) -> OneEach | None:
        """The rectangle of the first rank that has it, of those that are not empty; None unless these cover an array
        of this shape without overlaps."""
        owned = OneEach(self.bounds, self.numbers == np.arange(len(self)))
        return owned if covers_once(self.bounds[owned.present], shape) else None

    @cached_property
    def _all(self) -> tuple[Rectangles, ...]:
        rows = zip(self.bounds.tolist(), self.present.tolist(), strict=True)
        return tuple((Rectangle(tuple(start), tuple(stop)),) if there else () for (start, stop), there in rows)

    def __getitem__(self, rank: int) -> Rectangles:  # type: ignore[override]
        if not self.present[rank]:
            return ()
        start, stop = self.bounds[rank].tolist()
        return (Rectangle(tuple(start), tuple(stop)),)

    def __iter__(self) -> Iterator[Rectangles]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self.bounds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all)


@dataclass(frozen=True)
class ArrayPlacement:
    """The rectangles of one array on each rank. Ranks are numbers in the group that will communicate.

    A rank stores an array for each rectangle that it *holds*; it *owns* all, some or none of the elements it holds. An
    element has one owner; any other rank that holds it has a copy: a replica, or a halo. The rectangles of one rank are
    disjoint. A rank that stores nothing has no rectangles.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    held: Sequence[Rectangles]  #: by rank
    owned: Sequence[Rectangles]  #: by rank, each within a rectangle that it holds

    @classmethod
    def of_rectangles(
        cls,
        shape: Sequence[int],
        dtype: np.dtype,
        held: Sequence[Sequence[Rectangle]],
        owned: Sequence[Sequence[Rectangle]] | None = None,
    ) -> ArrayPlacement:
        """The placement of each rank's rectangles. Without ``owned``, the first rank that holds an element owns it."""
        by_rank = tuple(map(tuple, held))
        owners = tuple(map(tuple, owned)) if owned is not None else _first_holders(tuple(shape), by_rank)
        return cls(tuple(shape), np.dtype(dtype), by_rank, owners)

    @classmethod
    def of_spec(
        cls,
        spec: Spec | str,
        shape: Sequence[int],
        dtype: np.dtype,
        places: Sequence[MeshPosition],
        *,
        among: Mapping[str, Sequence[int]] | None = None,
        halos: Mapping[str, Interval] | None = None,
    ) -> ArrayPlacement:
        """Blocks of a sharding on a mesh whose ranks are at ``places``, in order.

        ``among={"pipe": (0, 2)}``: only ranks with these coordinates hold the array at all. ``halos={"h": (1, 2)}``:
        along h a rank also holds 1 element before and 2 behind its block, within the array; a rank whose block is
        empty holds nothing.

        >>> from spmd_engine.axes import all_positions
        >>> ranks = all_positions({"data": 2})
        >>> placement = ArrayPlacement.of_spec("b/data", (5,), "f4", ranks, halos={"b": (1, 1)})
        >>> [str(held) for held, in placement.held], [str(owned) for owned, in placement.owned]
        (['[0:4]', '[2:5]'], ['[0:3]', '[3:5]'])
        """
        spec = Spec.parse(spec) if isinstance(spec, str) else spec
        around = [(halos or {}).get(letter, (0, 0)) for letter in spec.letters]
        held, owned, owners = [], [], set()
        for place in places:
            if any(place.coordinates[axis] not in chosen for axis, chosen in (among or {}).items()):
                held.append(())
                owned.append(())
                continue
            block = Rectangle.of(spec.block(shape, place))
            owned.append(() if block in owners else (block,))
            owners.add(block)
            held.append((_with_halo(block, shape, around),))
        return cls(tuple(shape), np.dtype(dtype), tuple(held), tuple(owned))

    def on(self, ranks: Sequence[int], size: int) -> ArrayPlacement:
        """The same in a group of ``size`` ranks, in which this placement's rank i is number ``ranks[i]``."""
        held: list[Rectangles] = [()] * size
        owned: list[Rectangles] = [()] * size
        for number, rank in enumerate(ranks):
            held[rank], owned[rank] = self.held[number], self.owned[number]
        return ArrayPlacement(self.shape, self.dtype, tuple(held), tuple(owned))

    def nbytes(self, rank: int) -> int:
        """The bytes that a rank holds."""
        return sum(rectangle.size for rectangle in self.held[rank]) * self.dtype.itemsize

    def check(self, name: str) -> None:
        """Raise UsageError unless every element has one owner, which holds it."""
        for rank, (held, owned) in enumerate(zip(self.held, self.owned, strict=True)):
            for part in owned:
                if not any(part in block for block in held):
                    raise UsageError(f"{name}: rank {rank} owns {part}, which no rectangle that it holds contains")
            if any((one & other).size for i, one in enumerate(held) for other in held[:i]):
                raise UsageError(f"{name}: rank {rank} holds {', '.join(map(str, held))}, which overlap")
        grid = Grid(self.shape, [part for owned in self.owned for part in owned])
        owners = np.zeros(grid.shape, np.int64)
        for owned in self.owned:
            for part in owned:
                owners[grid.cells(part)] += 1
        for bad in grid.rectangles(owners != 1)[:1]:
            at, one = bad.start, Rectangle(bad.start, tuple(n + 1 for n in bad.start))
            ranks = [rank for rank, owned in enumerate(self.owned) if any(one in part for part in owned if part.size)]
            subject = f"ranks {', '.join(map(str, ranks))} all own" if ranks else "no rank owns"
            raise UsageError(f"{name}: {subject} the element at {at}; each element must have exactly one owner")


class Placement(Mapping[str, ArrayPlacement]):
    """The placements of several arrays, by name; the same on every rank."""

    def __init__(self, arrays: Mapping[str, ArrayPlacement]) -> None:
        self._arrays = dict(arrays)
        if len(sizes := {len(array.held) for array in self._arrays.values()}) > 1:
            raise UsageError(f"a placement is of one group of ranks; these arrays are placed on {sorted(sizes)} ranks")

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return next((len(array.held) for array in self.values()), 0)

    def on(self, ranks: Sequence[int], size: int) -> Placement:
        """The same in a larger group, or in another order: see ``ArrayPlacement.on``."""
        return Placement({name: array.on(ranks, size) for name, array in self.items()})

    def joined(self, more: Placement) -> Placement:
        """The same with more rectangles on each rank, which follow those that it holds, of some of its arrays."""
        arrays = dict(self._arrays)
        for name, added in more.items():
            held = [(*one, *other) for one, other in zip(arrays[name].held, added.held, strict=True)]
            arrays[name] = ArrayPlacement.of_rectangles(added.shape, added.dtype, held)
        return Placement(arrays)

    def nbytes(self, rank: int) -> int:
        """The bytes that a rank holds."""
        return sum(array.nbytes(rank) for array in self.values())

    def checked(self) -> Placement:
        """Return self; raises UsageError unless every element of every array has one owner, which holds it."""
        for name, array in self.items():
            array.check(name)
        return self

    def items(self) -> ItemsView[str, ArrayPlacement]:
        return self._arrays.items()  # faster than Mapping's: there may be hundreds of arrays

    def __getitem__(self, name: str) -> ArrayPlacement:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def ranks_of_blocks(placed: Sequence[Rectangles]) -> dict[Rectangle, list[int]]:
    """The ranks that hold each block that is not empty."""
    ranks: dict[Rectangle, list[int]] = {}
    for rank, held in enumerate(placed):
        for block in held:
            if block.size:
                ranks.setdefault(block, []).append(rank)
    return ranks


def ranks_with_the_same(placed: Sequence[Rectangles]) -> np.ndarray:
    """The first rank with the same rectangle, for each rank of those that have at most one; -1 if it has none, or an
    empty one."""
    if isinstance(placed, OneEach):
        return placed.numbers
    first: dict[Rectangle, int] = {}
    blocks = [next(iter(held), None) for held in placed]
    return np.array([first.setdefault(b, rank) if b and b.size else -1 for rank, b in enumerate(blocks)], np.int64)


@lru_cache(maxsize=256)
def _first_holders(shape: tuple[int, ...], held: Sequence[Rectangles]) -> tuple[Rectangles, ...]:
    """For each rank, the elements of which it is the first holder; equal layers share the result."""
    grid = Grid(shape, [rectangle for rectangles in held for rectangle in rectangles])
    first = np.full(grid.shape, -1)
    for rank, rectangles in enumerate(held):
        for rectangle in rectangles:
            if rectangle.size:
                part = first[(..., *grid.cells(rectangle))]  # a view, also of a 0-d array
                part[part < 0] = rank
    owned = []
    for rank, rectangles in enumerate(held):
        parts = grid.rectangles(first == rank)
        owned.append(tuple(shared for part in parts for rectangle in rectangles if (shared := part & rectangle).size))
    return tuple(owned)


def _with_halo(block: Rectangle, shape: Sequence[int], around: Sequence[Interval]) -> Rectangle:
    """A block with its halo; the block itself if it is empty along a dim that has a halo."""
    if any(a == b and any(widths) for a, b, widths in zip(block.start, block.stop, around, strict=True)):
        return block
    start = tuple(max(0, a - before) for a, (before, _) in zip(block.start, around, strict=True))
    ends = zip(block.stop, around, shape, strict=True)
    return Rectangle(start, tuple(min(length, b + behind) for b, (_, behind), length in ends))


# --- Placements from communication: every rank describes what it holds of all arrays at once


Held = Mapping[str, tuple[np.dtype, Rectangle]]  #: what one rank holds of some arrays: at most one rectangle of each


def exchange_placements(group: Group, held: Mapping[str, Held], *, label: str = "placement") -> dict[str, Placement]:
    """The placements of several sets of arrays, under the keys of ``held``, which has what this rank holds of each.

    One all_gather of numbers, O(own rectangles) from each rank; and one of the names of arrays, from the first of the
    ranks that have equal ones, unless all have. An array extends to the largest stop of its rectangles; ``check`` and
    ``plan_transfer`` raise if they do not cover it. The first rank that holds an element owns it.
    """
    kinds: dict[tuple[np.dtype, Rectangle], int] = {}
    numbers = {
        key: {name: kinds.setdefault(kind, len(kinds)) for name, kind in arrays.items()} for key, arrays in held.items()
    }
    pattern = {"kinds": [(describe(dtype), len(part.start)) for dtype, part in kinds], "arrays": numbers}
    bounds = [number for _, part in kinds for number in (*part.start, *part.stop)]
    gathered = group.all_gather(np.array([number_of((repr(pattern),)), len(bounds), *bounds], np.int64), label=label)
    rows, at = [], 0
    while at < len(gathered):
        rows.append(gathered[at : at + 2 + int(gathered[at + 1])])
        at += len(rows[-1])
    members: dict[int, list[int]] = {}  # the ranks that have equal patterns
    numbers_of_patterns = [int(row[0]) for row in rows]
    for rank, number in enumerate(numbers_of_patterns):
        members.setdefault(number, []).append(rank)
    patterns = of_equal_ranks(group, pattern, numbers_of_patterns, label)
    classes = []
    for ranks in members.values():
        numbers_of_ranks = np.concatenate([rows[rank][2:] for rank in ranks]).reshape(len(ranks), -1)
        classes.append((patterns[ranks[0]], np.array(ranks), numbers_of_ranks))
    del gathered, rows  # which may be large
    return _placements(classes, group.size)


def _placements(classes: Sequence[tuple[Mapping[str, Any], np.ndarray, np.ndarray]], size: int) -> dict[str, Placement]:
    """The placements on ``size`` ranks, from the ranks with equal patterns: the pattern, the ranks, and the bounds of
    their rectangles, int[ranks, numbers]. Arrays of which all ranks hold equal parts share one ArrayPlacement."""
    ends = [np.cumsum([0, *(2 * dims for _, dims in pattern["kinds"])]).tolist() for pattern, _, _ in classes]
    arrays: dict[tuple[int, ...], ArrayPlacement] = {}

    def placed(numbers: tuple[int, ...]) -> ArrayPlacement:
        some = next(place for place, number in enumerate(numbers) if number >= 0)
        dtype, dims = classes[some][0]["kinds"][numbers[some]]
        bounds, present = np.zeros((size, 2, dims), np.int64), np.zeros(size, bool)
        for (_, ranks, rows), ends_of_kinds, number in zip(classes, ends, numbers, strict=True):
            if number >= 0:
                bounds[ranks] = rows[:, ends_of_kinds[number] : ends_of_kinds[number + 1]].reshape(len(ranks), 2, dims)
                present[ranks] = True
        held = OneEach(bounds, present)
        shape = tuple(bounds[present, 1].max(axis=0).tolist())
        owned = held.first_holders(shape)
        return ArrayPlacement(shape, described(dtype), held, _first_holders(shape, held) if owned is None else owned)

    placements: dict[str, Placement] = {}
    for key in classes[0][0]["arrays"]:
        by_class = [pattern["arrays"][key] for pattern, _, _ in classes]
        equal = [other for other in placements if [pattern["arrays"][other] for pattern, _, _ in classes] == by_class]
        if equal:
            placements[key] = placements[equal[0]]
            continue
        placement = {}
        for name in dict.fromkeys(chain(*by_class)):
            numbers = tuple(numbered.get(name, -1) for numbered in by_class)
            if numbers not in arrays:
                arrays[numbers] = placed(numbers)
            placement[name] = arrays[numbers]
        placements[key] = Placement(placement)
    return placements


def exchange_shapes(
    group: Group, place: MeshPosition, blocks: Mapping[str, tuple[Spec, Sequence[int]]], *, label: str = "shape"
) -> dict[str, tuple[int, ...]]:
    """The whole shapes of arrays sharded over a mesh, from the shapes of all ranks' blocks. One all_gather, or two.

    ``group`` has all ranks of the mesh, and this rank is at ``place``. The result lacks an array if a rank along the
    axes that shard it does not have it.
    """
    gathered = gather_equal_json(group, {name: tuple(shape) for name, (_, shape) in blocks.items()}, label)

    @cache
    def along(axes: tuple[str, ...]) -> list[tuple[Mapping[str, Sequence[int]], int]]:
        """The shapes that ranks along these axes have, and how many have them."""
        objects = [gathered[peer.index(None)] for peer in place.peers(axes)]
        counts, by_id = Counter(map(id, objects)), dict(zip(map(id, objects), objects, strict=True))
        return [(by_id[number], count) for number, count in counts.items()]

    whole = {}
    for name, (spec, shape) in blocks.items():
        dims = [[(shapes.get(name) or (), count) for shapes, count in along(axes)] for _, axes in spec]
        if all(len(other) == len(shape) for others in dims for other, _ in others):
            whole[name] = tuple(sum(other[dim] * count for other, count in others) for dim, others in enumerate(dims))
    return whole
