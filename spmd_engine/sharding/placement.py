"""Which rectangles of which global arrays each rank has: pure functions of coordinates, no communication."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from spmd_engine.arrays.dtypes import describe, described
from spmd_engine.axes import MeshPosition
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.comm.group import Group
from spmd_engine.comm.notation import Spec
from spmd_engine.errors import UsageError
from spmd_engine.sharding.rectangles import Grid, Rectangle

Rectangles = tuple[Rectangle, ...]
Interval = tuple[int, int]  # start and stop along a dim


@dataclass(frozen=True)
class ArrayPlacement:
    """The rectangles of one array on each rank. Ranks are numbers in the group that will communicate.

    A rank stores an array for each rectangle that it *holds*; it *owns* all, some or none of the elements it holds. An
    element has one owner; any other rank that holds it has a copy: a replica, or a halo. The rectangles of one rank are
    disjoint. A rank that stores nothing has no rectangles.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    held: tuple[Rectangles, ...]  #: by rank
    owned: tuple[Rectangles, ...]  #: by rank, each within a rectangle that it holds

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


@lru_cache(maxsize=256)
def _first_holders(shape: tuple[int, ...], held: tuple[Rectangles, ...]) -> tuple[Rectangles, ...]:
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
    if any(a == b and any(widths) for (a, b), widths in zip(_sides(block), around, strict=True)):
        return block
    start = tuple(max(0, a - before) for a, (before, _) in zip(block.start, around, strict=True))
    ends = zip(block.stop, around, shape, strict=True)
    return Rectangle(start, tuple(min(length, b + behind) for b, (_, behind), length in ends))


def _sides(rectangle: Rectangle) -> list[Interval]:
    return list(zip(rectangle.start, rectangle.stop, strict=True))


# --- Placements from communication: every rank describes what it holds of all arrays at once


def exchange_placements(
    group: Group, held: Mapping[str, tuple[np.dtype, Rectangle]], *, label: str = "placement"
) -> Placement:
    """The placement of arrays of which each rank holds at most one rectangle: this rank those in ``held``.

    One all_gather. An array extends to the largest stop of its rectangles; ``check`` and ``plan_transfer`` raise if
    they do not cover it. The first rank that holds an element owns it.
    """
    return placement_of_all(gather_json(group, describe_held(held), label))


def describe_held(held: Mapping[str, tuple[np.dtype, Rectangle]]) -> dict[str, Any]:
    """The rectangles that a rank holds, as JSON: each rectangle once, and its number for each array."""
    kinds: dict[tuple[np.dtype, Rectangle], int] = {}
    numbers = {name: kinds.setdefault(kind, len(kinds)) for name, kind in held.items()}
    return {"kinds": [(describe(dtype), part.start, part.stop) for dtype, part in kinds], "arrays": numbers}


def placement_of_all(descriptions: Sequence[Mapping[str, Any]]) -> Placement:
    """The placement from the descriptions of all ranks; arrays with equal descriptions share one ArrayPlacement."""
    kinds = [[_hashable(kind) for kind in description["kinds"]] + [None] for description in descriptions]
    placements: dict[tuple[int, ...], ArrayPlacement] = {}
    arrays = {}
    for name in dict.fromkeys(name for description in descriptions for name in description["arrays"]):
        numbers = tuple(description["arrays"].get(name, -1) for description in descriptions)
        if numbers not in placements:
            placements[numbers] = _placed(tuple(row[n] for row, n in zip(kinds, numbers, strict=True)))
        arrays[name] = placements[numbers]
    return Placement(arrays)


def exchange_shapes(
    group: Group, place: MeshPosition, blocks: Mapping[str, tuple[Spec, Sequence[int]]], *, label: str = "shape"
) -> dict[str, tuple[int, ...]]:
    """The whole shapes of arrays sharded over a mesh, from the shapes of all ranks' blocks. One all_gather.

    ``group`` has all ranks of the mesh, and this rank is at ``place``. The result lacks an array if a rank along the
    axes that shard it does not have it.
    """
    gathered = gather_json(group, {name: tuple(shape) for name, (_, shape) in blocks.items()}, label)
    shapes = {}
    for name, (spec, shape) in blocks.items():
        along = [[gathered[peer.index(None)].get(name) for peer in place.peers(axes)] for _, axes in spec]
        if all(len(other or ()) == len(shape) for others in along for other in others):
            shapes[name] = tuple(sum(other[dim] for other in others) for dim, others in enumerate(along))
    return shapes


_Kind = tuple[str, tuple[int, ...], tuple[int, ...]]  # a dtype, start and stop


def _hashable(kind: Sequence) -> _Kind:
    return kind[0], tuple(kind[1]), tuple(kind[2])


@lru_cache(maxsize=256)
def _placed(kinds: tuple[_Kind | None, ...]) -> ArrayPlacement:
    """The placement from each rank's kind, None if it holds nothing; equal layers share the result."""
    held = [() if kind is None else (Rectangle(kind[1], kind[2]),) for kind in kinds]
    stops = [part.stop for parts in held for part in parts]
    dtype = next(kind[0] for kind in kinds if kind is not None)
    return ArrayPlacement.of_rectangles(tuple(map(max, zip(*stops, strict=True))), described(dtype), held)
