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
from spmd_engine.errors import UsageError
from spmd_engine.sharding.notation import Spec
from spmd_engine.sharding.rectangles import Grid, Rectangle

Rectangles = tuple[Rectangle, ...]
Interval = tuple[int, int]  # start and stop along a dim


@dataclass(frozen=True)
class ArrayPlacement:
    """Which rank has what of one array. Ranks are numbers in the group that will communicate.

    A rank stores an array for each rectangle that it *holds*; of those it *owns* some parts, or all, or none. An
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
        """From what every rank holds. Without ``owned``, the first rank that holds an element owns it."""
        everyone = tuple(map(tuple, held))
        owners = tuple(map(tuple, owned)) if owned is not None else _first_holders(tuple(shape), everyone)
        return cls(tuple(shape), np.dtype(dtype), everyone, owners)

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
        """Blocks of a sharding on a mesh, of which ``places`` are the ranks in order.

        ``among={"pipe": (0, 2)}``: only ranks with these coordinates hold the array at all. ``halos={"h": (1, 2)}``:
        along h a block goes on for 1 element before and 2 behind what it owns, as far as the array goes; a block
        that owns nothing holds nothing.

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
        """The same in a group of ``size`` ranks, of which number ``ranks[i]`` is this placement's rank i."""
        held: list[Rectangles] = [()] * size
        owned: list[Rectangles] = [()] * size
        for number, rank in enumerate(ranks):
            held[rank], owned[rank] = self.held[number], self.owned[number]
        return ArrayPlacement(self.shape, self.dtype, tuple(held), tuple(owned))

    def nbytes(self, rank: int) -> int:
        """The bytes of what a rank holds."""
        return sum(each.size for each in self.held[rank]) * self.dtype.itemsize

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
            who = f"ranks {', '.join(map(str, ranks))} all own" if ranks else "no rank owns"
            raise UsageError(f"{name}: {who} the element at {at}; each element must have exactly one owner")


class Placement(Mapping[str, ArrayPlacement]):
    """Which rank has what of several arrays, by name; the same on every rank."""

    def __init__(self, arrays: Mapping[str, ArrayPlacement]) -> None:
        self._arrays = dict(arrays)
        if len(sizes := {len(array.held) for array in self._arrays.values()}) > 1:
            raise UsageError(f"a placement is of one group of ranks; these arrays are placed on {sorted(sizes)} ranks")

    @cached_property
    def ranks(self) -> int:
        """How many ranks there are."""
        return next((len(array.held) for array in self.values()), 0)

    def on(self, ranks: Sequence[int], size: int) -> Placement:
        """The same in a larger group, or in another order: see ``ArrayPlacement.on``."""
        return Placement({name: array.on(ranks, size) for name, array in self.items()})

    def nbytes(self, rank: int) -> int:
        """The bytes of what a rank holds."""
        return sum(array.nbytes(rank) for array in self.values())

    def checked(self) -> Placement:
        """Itself; raises UsageError unless every element of every array has one owner, which holds it."""
        for name, array in self.items():
            array.check(name)
        return self

    def items(self) -> ItemsView[str, ArrayPlacement]:
        return self._arrays.items()  # in C: there are hundreds

    def __getitem__(self, name: str) -> ArrayPlacement:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def ranks_of_blocks(placed: Sequence[Rectangles]) -> dict[Rectangle, list[int]]:
    """Every block that is not empty, with the ranks that have it."""
    ranks: dict[Rectangle, list[int]] = {}
    for rank, held in enumerate(placed):
        for each in held:
            if each.size:
                ranks.setdefault(each, []).append(rank)
    return ranks


@lru_cache(maxsize=256)
def _first_holders(shape: tuple[int, ...], held: tuple[Rectangles, ...]) -> tuple[Rectangles, ...]:
    """The parts of the array of which each rank is the first that holds them; of layers of a kind, the same."""
    grid = Grid(shape, [each for of_rank in held for each in of_rank])
    first = np.full(grid.shape, -1)
    for rank, of_rank in enumerate(held):
        for each in of_rank:
            if each.size:
                part = first[(..., *grid.cells(each))]  # a view, also of a number
                part[part < 0] = rank
    owned = []
    for rank, of_rank in enumerate(held):
        parts = grid.rectangles(first == rank)
        owned.append(tuple(shared for part in parts for each in of_rank if (shared := part & each).size))
    return tuple(owned)


def _with_halo(block: Rectangle, shape: Sequence[int], around: Sequence[Interval]) -> Rectangle:
    """A block with what is around it; of an empty batch, too, but nothing is around no rows at all."""
    if any(a == b and any(beside) for (a, b), beside in zip(_sides(block), around, strict=True)):
        return block
    start = tuple(max(0, a - before) for a, (before, _) in zip(block.start, around, strict=True))
    ends = zip(block.stop, around, shape, strict=True)
    return Rectangle(start, tuple(min(length, b + behind) for b, (_, behind), length in ends))


def _sides(rectangle: Rectangle) -> list[Interval]:
    return list(zip(rectangle.start, rectangle.stop, strict=True))


# --- Placements that no rank knows alone: every rank describes what it holds, of all arrays at once


def exchange_placements(
    group: Group, held: Mapping[str, tuple[np.dtype, Rectangle]], *, label: str = "placement"
) -> Placement:
    """The placement of arrays of which this rank holds one rectangle each, or none: those it does not name.

    One all_gather. An array is as large as the rectangles reach; ``check`` and ``plan_transfer`` find out whether they
    cover it. The first rank that holds an element owns it.
    """
    return placement_of_all(gather_json(group, describe_held(held), label))


def describe_held(held: Mapping[str, tuple[np.dtype, Rectangle]]) -> dict[str, Any]:
    """The rectangles that a rank holds, as JSON: each once, and for each array the number of its rectangle."""
    kinds: dict[tuple[np.dtype, Rectangle], int] = {}
    numbers = {name: kinds.setdefault(each, len(kinds)) for name, each in held.items()}
    return {"kinds": [(describe(dtype), part.start, part.stop) for dtype, part in kinds], "arrays": numbers}


def placement_of_all(everyone: Sequence[Mapping[str, Any]]) -> Placement:
    """The placement from the descriptions of all ranks; arrays with equal descriptions share one ArrayPlacement."""
    kinds = [[_hashable(each) for each in said["kinds"]] + [None] for said in everyone]
    found: dict[tuple[int, ...], ArrayPlacement] = {}
    arrays = {}
    for name in dict.fromkeys(name for said in everyone for name in said["arrays"]):
        numbers = tuple(said["arrays"].get(name, -1) for said in everyone)
        if numbers not in found:
            found[numbers] = _placed(tuple(of_rank[n] for of_rank, n in zip(kinds, numbers, strict=True)))
        arrays[name] = found[numbers]
    return Placement(arrays)


def exchange_shapes(
    group: Group, place: MeshPosition, blocks: Mapping[str, tuple[Spec, Sequence[int]]], *, label: str = "shape"
) -> dict[str, tuple[int, ...]]:
    """The whole shapes of arrays cut over a mesh, from the shapes of everyone's blocks. One all_gather.

    ``group`` is all of the mesh, at ``place`` on it this rank. Of arrays that not all of those have along whose axes
    they are cut, nothing is said.
    """
    everyone = gather_json(group, {name: tuple(shape) for name, (_, shape) in blocks.items()}, label)
    shapes = {}
    for name, (spec, shape) in blocks.items():
        along = [[everyone[peer.index(None)].get(name) for peer in place.peers(axes)] for _, axes in spec]
        if all(len(said or ()) == len(shape) for found in along for said in found):
            shapes[name] = tuple(sum(said[dim] for said in found) for dim, found in enumerate(along))
    return shapes


_Said = tuple[str, tuple[int, ...], tuple[int, ...]]  # a dtype, start and stop


def _hashable(said: Sequence) -> _Said:
    return said[0], tuple(said[1]), tuple(said[2])


@lru_cache(maxsize=256)
def _placed(said: tuple[_Said | None, ...]) -> ArrayPlacement:
    """By what each rank said; of layers of a kind, all say the same."""
    held = [() if each is None else (Rectangle(each[1], each[2]),) for each in said]
    stops = [part.stop for parts in held for part in parts]
    dtype = next(each[0] for each in said if each is not None)
    return ArrayPlacement.of_rectangles(tuple(map(max, zip(*stops, strict=True))), described(dtype), held)
