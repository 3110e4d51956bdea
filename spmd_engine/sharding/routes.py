"""Who gives which rectangles to whom, so that each element goes once to every rank that lacks it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.blocks import span
from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError
from spmd_engine.sharding.placement import ArrayPlacement, Placement, Rectangles, ranks_of_blocks
from spmd_engine.sharding.rectangles import Grid, Rectangle, meetings


@dataclass(frozen=True)
class Multicast:
    """What one rank gives to some ranks, itself perhaps among them: ``parts``, one behind the other."""

    sender: int
    receivers: tuple[int, ...]  #: ascending
    parts: tuple[tuple[str, Rectangle], ...]  #: name of the array, and what of it

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(part.size for _, part in self.parts)]

    def portion(self, number: int, of: int) -> Iterator[tuple[str, Rectangle]]:
        """One of so many consecutive portions, as even as can be, as rectangles."""
        if of == 1:
            yield from self.parts
            return
        mine = span(self.size, of, number)
        for (name, part), (start, stop) in zip(self.parts, pairwise(self._ends), strict=True):
            for each in part.elements(max(mine.start, start) - start, min(mine.stop, stop) - start):
                yield name, each


def find_routes(
    source: Mapping[str, ArrayPlacement],
    target: Mapping[str, ArrayPlacement],
    nodes: Sequence[Hashable],
    from_owners: bool,
) -> dict[np.dtype, tuple[Multicast, ...]]:
    """All routes by which ``target`` comes about, by dtype; the same on every rank.

    A rank that has an element keeps it. What it lacks it gets once: from one of its own node, if one there has it;
    and of several of those, from the one that has the least to send so far, the first of these. ``nodes``: of each
    rank, anything that tells its node from others.

    Raises UsageError where somebody wants what nobody has.
    """
    load = [0] * len(nodes)  # bytes that each rank sends
    found: dict[np.dtype, dict[tuple[int, tuple[int, ...]], list[tuple[str, Rectangle]]]] = {}
    known: dict[tuple[int, int], tuple[SharedPart, ...]] = {}  # of placements that layers of a kind share
    for name, wanted in target.items():
        routes, held = found.setdefault(wanted.dtype, {}), source[name]
        kind = id(held), id(wanted)
        try:
            if kind not in known:
                known[kind] = _parts(held.shape, held.owned if from_owners else held.held, wanted.held)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
        for part in known[kind]:
            for sender, ranks in _senders(part, nodes, load, wanted.dtype.itemsize):
                routes.setdefault((sender, ranks), []).extend([(name, each) for each in part.rectangles])
    return {
        dtype: tuple(Multicast(*ends, tuple(parts)) for ends, parts in sorted(routes.items()))
        for dtype, routes in found.items()
    }


@dataclass(frozen=True)
class SharedPart:
    """Elements of an array that the same ranks have and the same ranks want; never across two blocks of a rank."""

    holders: Sequence[int]
    takers: Sequence[int]
    elements: int
    rectangles: Sequence[Rectangle]

    @cached_property
    def kept(self) -> list[tuple[int, tuple[int, ...]]]:
        """Who has what he wants, each as its own sender."""
        return [(rank, (rank,)) for rank in self.takers if rank in self.holders]

    @cached_property
    def lacking(self) -> list[int]:
        return [rank for rank in self.takers if rank not in self.holders]


def _senders(
    part: SharedPart, nodes: Sequence[Hashable], load: list[int], itemsize: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Who gives a part to whom, himself perhaps among them; adds to the bytes that each sends."""
    if not part.lacking:
        return part.kept
    receivers = {rank: [rank] for rank, _ in part.kept}
    for taker in part.lacking:
        near = [rank for rank in part.holders if nodes[rank] == nodes[taker]]
        sender = min(near or part.holders, key=load.__getitem__)
        load[sender] += part.elements * itemsize
        receivers.setdefault(sender, []).append(taker)
    return [(sender, tuple(sorted(ranks))) for sender, ranks in receivers.items()]


@lru_cache(maxsize=1024)
def _parts(
    shape: tuple[int, ...], given: tuple[Rectangles, ...], wanted: tuple[Rectangles, ...]
) -> tuple[SharedPart, ...]:
    """All that is wanted of an array, by who has it and who wants it; of layers of a kind, the same.

    Raises UsageError where nobody has it.
    """
    of_blocks = _parts_of_blocks(ranks_of_blocks(given), ranks_of_blocks(wanted))
    return tuple(of_blocks if of_blocks is not None else _parts_of_grid(shape, given, wanted))


def _parts_of_blocks(
    given: Mapping[Rectangle, list[int]], wanted: Mapping[Rectangle, list[int]]
) -> list[SharedPart] | None:
    """What each block that is given shares with each that is wanted; None where blocks of a side overlap, or lack some.

    Models' parameters are cut like this, hundreds of them: all pairs of blocks are met at once.
    """
    if not wanted or not given:
        return None if wanted else []
    sizes = [meetings(side, side)[2] for side in (given, wanted)]
    begin, end, shared = meetings(given, wanted)
    if any(np.count_nonzero(each) > len(each) for each in sizes) or (shared.sum(axis=0) < sizes[1].diagonal()).any():
        return None
    holders, takers, parts = list(given.values()), list(wanted.values()), []
    for i, j in np.argwhere(shared).tolist():
        rectangle = Rectangle(tuple(begin[i, j].tolist()), tuple(end[i, j].tolist()))
        parts.append(SharedPart(holders[i], takers[j], rectangle.size, [rectangle]))
    return parts


def _parts_of_grid(shape: Sequence[int], given: Sequence[Rectangles], wanted: Sequence[Rectangles]) -> list[SharedPart]:
    """The same of blocks that may overlap, by cells that lie inside or outside each of them."""
    grid = Grid(shape, [each for side in (given, wanted) for held in side for each in held])
    sizes = grid.sizes()
    ranks = len(given)
    # Of each side, rank and cell, the number of the rank's rectangle that has the cell: parts never go across two.
    number = np.full((2, ranks, *grid.shape), -1, np.int32)
    for side, placed in enumerate((given, wanted)):
        for rank, held in enumerate(placed):
            for i, each in enumerate(held):
                if each.size:
                    number[(side, rank, *grid.cells(each))] = i
    has, wants = np.any(number >= 0, axis=1)
    for lacking in grid.rectangles(wants & ~has)[:1]:
        raise UsageError(
            f"ranks hold {sizes[has].sum()} of its {sizes.sum()} elements; is its sharding right? "
            f"Nobody holds the one at {lacking.start}"
        )
    if not sizes.size:
        return []
    patterns, which = np.unique(number.reshape(2 * ranks, -1), axis=1, return_inverse=True)
    which = which.reshape(grid.shape)
    parts = []
    for i, pattern in enumerate(patterns.T >= 0):
        holders, takers = np.flatnonzero(pattern[:ranks]).tolist(), np.flatnonzero(pattern[ranks:]).tolist()
        if takers:
            parts.append(SharedPart(holders, takers, int(sizes[which == i].sum()), grid.rectangles(which == i)))
    return parts


def count_rounds(routes: Sequence[Multicast], ranks: int, most: int) -> int:
    """In how many portions to cut the routes, so that of each no rank sends, or receives, more than ``most`` elements.

    0 if nothing has to be sent at all. A portion of a route is at least an element, until there are no more.
    """
    travelling = [route for route in routes if route.receivers != (route.sender,)]
    if not travelling:
        return 0
    sizes = np.array([route.size for route in travelling])
    ends = [(i, route.sender, to) for i, route in enumerate(travelling) for to in route.receivers if to != route.sender]
    number, senders, receivers = np.array(ends).T

    def largest(rounds: int) -> int:
        portions = (-(-sizes // rounds))[number]
        return int(max(np.bincount(side, portions, ranks).max() for side in (senders, receivers)))

    return 1 + bisect_left(range(1, int(sizes.max())), True, key=lambda rounds: largest(rounds) <= most)


# --- A rank's part in one round of a transfer: a flat piece, and where in the rank's blocks its elements belong


Blocks = Mapping[str, Sequence[Array]]  #: by name, an array for each rectangle that a rank holds, in their order


@dataclass(frozen=True)
class Copy:
    """Consecutive elements of a flat array that are a rectangle of one of a rank's blocks."""

    elements: slice  #: those, in the flat array
    shape: tuple[int, ...]
    name: str
    number: int  #: which of the rank's blocks of that name
    index: tuple  #: where in the block

    def of(self, flat: Array) -> Array:
        """Its elements in the flat array, in their shape: a view."""
        return flat[self.elements].reshape(self.shape)

    def at(self, blocks: Blocks) -> Array:
        """Its elements in the rank's blocks: a view."""
        return blocks[self.name][self.number][self.index]


@dataclass(frozen=True)
class Segment:
    """What of a piece one route brings to, or from, one other rank."""

    route: Multicast
    first: int  #: element of the piece
    size: int
    copies: tuple[Copy, ...]  #: counted from ``first``
    link: tuple[int, int] = (0, 0)  #: where in the piece that begins, and ends, which goes to, or comes from, that rank

    def of(self, piece: Array, number: int = 0, several: int = 1) -> Array:
        """What of a piece this is; of one of ``several`` sets of blocks, of each link side by side, what of set
        ``number``."""
        begun, ended = self.link
        first = self.first + (several - 1) * begun + number * (ended - begun)
        return piece[first : first + self.size]

    def pack(self, blocks: Blocks, flat: Array) -> None:
        """Fill its flat array from the rank's blocks."""
        for copy in self.copies:
            copy.of(flat)[...] = copy.at(blocks)

    def unpack(self, flat: Array, blocks: Blocks) -> None:
        """Put the elements of its flat array where they belong."""
        for copy in self.copies:
            copy.at(blocks)[...] = copy.of(flat)

    def add(self, flat: Array, blocks: Blocks) -> None:
        """Add the elements of its flat array where they belong."""
        for copy in self.copies:
            add(copy.of(flat), copy.at(blocks))


@dataclass(frozen=True)
class Piece:
    """All that a rank sends, or receives, in a round: segments in the order of the other ranks."""

    splits: tuple[int, ...]  #: elements for, or from, each rank
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return sum(self.splits)


def make_segment(placement: Placement, rank: int, route: Multicast, first: int, number: int, of: int) -> Segment:
    """Portion ``number`` of ``of`` of a route, as it lies in a rank's blocks."""
    copies, size = [], 0
    for name, part in route.portion(number, of):
        held = placement[name].held[rank]
        block = 0 if len(held) == 1 else next(i for i, each in enumerate(held) if part in each)
        end, within = size + part.size, part.within(held[block])
        copies.append(Copy(slice(size, end), part.shape, name, block, (..., *within.index)))  # of a number, too, a view
        size = end
    return Segment(route, first, size, tuple(copies))


def given(placement: Placement, rank: int, routes: Sequence[Multicast], number: int, of: int) -> Piece:
    """What a rank sends in a round."""
    mine = [route for route in routes if route.sender == rank]
    links = [[route for route in mine if other in route.receivers] for other in range(placement.ranks)]
    return _piece(placement, rank, links, number, of)


def taken(placement: Placement, rank: int, routes: Sequence[Multicast], number: int, of: int) -> Piece:
    """What a rank receives in a round."""
    mine = [route for route in routes if rank in route.receivers]
    links = [[route for route in mine if route.sender == other] for other in range(placement.ranks)]
    return _piece(placement, rank, links, number, of)


def _piece(placement: Placement, rank: int, links: Sequence[Sequence[Multicast]], number: int, of: int) -> Piece:
    segments, splits, first = [], [], 0
    for other, routes in enumerate(links):
        begun, here = first, []
        for route in routes if other != rank else ():
            here.append(make_segment(placement, rank, route, first, number, of))
            first += here[-1].size
        segments += [replace(each, link=(begun, first)) for each in here]
        splits.append(first - begun)
    return Piece(tuple(splits), tuple(segments))


def add(x: Array, place: Array) -> None:
    """``place += x``, where ``place`` may be a view of a number."""
    backend_of(place).xp.add(place, x, out=place)


def copy_unless_there(x: Array, place: Array) -> None:
    """``place[...] = x``, which is nothing to do where ``x`` lies there already, as what is inside a halo may."""
    if not (isinstance(x, np.ndarray) and address_of(x) == address_of(place) and x.strides == place.strides):
        place[...] = x


def new_blocks(placement: Placement, rank: int, backend: Backend, *, zero: bool = False) -> Blocks:
    """A rank's blocks, of zeros or with any values in them."""
    make = backend.xp.zeros if zero else backend.empty
    return {name: [make(each.shape, array.dtype) for each in array.held[rank]] for name, array in placement.items()}


def backend_of_blocks(placement: Placement, blocks: Blocks) -> Backend | None:
    """That of the first; None of a rank that has none."""
    return next((backend_of(block) for name in placement for block in blocks.get(name, ())), None)


def check_blocks(placement: Placement, group: Group, blocks: Blocks) -> Backend | None:
    """Raise UsageError unless ``blocks`` are this rank's of the placement. Returns the backend of the first."""
    if placement and group.size != placement.ranks:
        raise UsageError(f"transfer over {group.axes!r}, {group.size} ranks: it is planned for {placement.ranks}")
    for name, array in placement.items():
        found, held = blocks.get(name, ()), array.held[group.rank]
        if [(x.shape, x.dtype) for x in found] != [(each.shape, array.dtype) for each in held]:
            here = ", ".join(f"{x.dtype}{list(x.shape)}" for x in found)
            there = ", ".join(f"{array.dtype}{list(each.shape)}" for each in held)
            raise UsageError(
                f"transfer: the blocks of {name} on rank {group.rank} are {here or 'none'}; placed there are "
                f"{there or 'none'}"
            )
    return backend_of_blocks(placement, blocks)
