"""Routes: which rank sends which rectangles to which ranks, so that each rank receives what it lacks once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.arrays.memory import address_of
from spmd_engine.comm import Group
from spmd_engine.comm.blocks import span
from spmd_engine.errors import UsageError
from spmd_engine.sharding.placement import ArrayPlacement, Placement, Rectangles, ranks_of_blocks
from spmd_engine.sharding.rectangles import Grid, Rectangle, intersections


@dataclass(frozen=True)
class Multicast:
    """The ``parts`` that one rank sends to some ranks, perhaps to itself, one after the other."""

    sender: int
    receivers: tuple[int, ...]  #: ascending
    parts: tuple[tuple[str, Rectangle], ...]  #: the array's name, and a rectangle of it

    @property
    def size(self) -> int:
        """The number of its elements."""
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(part.size for _, part in self.parts)]

    def portion(self, number: int, of: int, count: int = 1) -> Iterator[tuple[str, Rectangle]]:
        """Portion ``number`` of ``of`` consecutive, even portions, as rectangles; or ``count`` portions from it."""
        if of == count:
            yield from self.parts
            return
        first, last = span(self.size, of, number).start, span(self.size, of, number + count - 1).stop
        for (name, part), (start, stop) in zip(self.parts, pairwise(self._ends), strict=True):
            for rectangle in part.elements(max(first, start) - start, min(last, stop) - start):
                yield name, rectangle


def find_routes(
    source: Mapping[str, ArrayPlacement],
    target: Mapping[str, ArrayPlacement],
    nodes: Sequence[Hashable],
    from_owners: bool,
) -> dict[np.dtype, tuple[Multicast, ...]]:
    """All routes from ``source`` to ``target``, by dtype; the same on every rank.

    A rank keeps the elements that it has. It receives each element that it lacks once: from a rank of its own node if
    one has it, and among several from the first with the fewest bytes to send so far. ``nodes``: an identifier of each
    rank's node.

    Raises UsageError where a rank wants elements that no rank has.
    """
    load = [0] * len(nodes)  # bytes that each rank sends
    routes_by_dtype: dict[np.dtype, dict[tuple[int, tuple[int, ...]], list[tuple[str, Rectangle]]]] = {}
    shared_parts: dict[tuple[int, int], tuple[SharedPart, ...]] = {}  # those of placements that equal layers share
    for name, wanted in target.items():
        routes, held = routes_by_dtype.setdefault(wanted.dtype, {}), source[name]
        kind = id(held), id(wanted)
        try:
            if kind not in shared_parts:
                shared_parts[kind] = _parts(held.shape, held.owned if from_owners else held.held, wanted.held)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
        for part in shared_parts[kind]:
            for sender, ranks in _senders(part, nodes, load, wanted.dtype.itemsize):
                routes.setdefault((sender, ranks), []).extend([(name, rectangle) for rectangle in part.rectangles])
    return {
        dtype: tuple(Multicast(*ends, tuple(parts)) for ends, parts in sorted(routes.items()))
        for dtype, routes in routes_by_dtype.items()
    }


@dataclass(frozen=True)
class SharedPart:
    """Elements of an array that the same ranks have and the same ranks want, within one block of each rank."""

    holders: Sequence[int]
    takers: Sequence[int]
    elements: int
    rectangles: Sequence[Rectangle]

    @cached_property
    def kept(self) -> list[tuple[int, tuple[int, ...]]]:
        """The takers that have the elements already, each as its own sender."""
        return [(rank, (rank,)) for rank in self.takers if rank in self.holders]

    @cached_property
    def lacking(self) -> list[int]:
        return [rank for rank in self.takers if rank not in self.holders]


def _senders(
    part: SharedPart, nodes: Sequence[Hashable], load: list[int], itemsize: int
) -> list[tuple[int, tuple[int, ...]]]:
    """The ranks that send a part, each with its receivers, perhaps itself; adds to the bytes that each rank sends."""
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
def _parts(shape: tuple[int, ...], held: Sequence[Rectangles], wanted: Sequence[Rectangles]) -> tuple[SharedPart, ...]:
    """The shared parts of all wanted elements of an array; equal layers share the result.

    Raises UsageError where no rank has a wanted element.
    """
    of_blocks = _parts_of_blocks(ranks_of_blocks(held), ranks_of_blocks(wanted))
    return tuple(of_blocks if of_blocks is not None else _parts_of_grid(shape, held, wanted))


def _parts_of_blocks(
    held: Mapping[Rectangle, list[int]], wanted: Mapping[Rectangle, list[int]]
) -> list[SharedPart] | None:
    """Intersections of held with wanted blocks; None if blocks of a side overlap, or wanted elements are missing.

    Parameters of models are sharded like this, hundreds of them: all pairs of blocks are compared at once.
    """
    if not wanted or not held:
        return None if wanted else []
    sizes = [intersections(side, side)[2] for side in (held, wanted)]
    begin, end, shared = intersections(held, wanted)
    if any(np.count_nonzero(pairs) > len(pairs) for pairs in sizes) or (shared.sum(axis=0) < sizes[1].diagonal()).any():
        return None
    holders, takers, parts = list(held.values()), list(wanted.values()), []
    for i, j in np.argwhere(shared).tolist():
        rectangle = Rectangle(tuple(begin[i, j].tolist()), tuple(end[i, j].tolist()))
        parts.append(SharedPart(holders[i], takers[j], rectangle.size, [rectangle]))
    return parts


def _parts_of_grid(shape: Sequence[int], held: Sequence[Rectangles], wanted: Sequence[Rectangles]) -> list[SharedPart]:
    """The shared parts of blocks that may overlap, by cells that lie inside or outside each block."""
    grid = Grid(shape, [part for side in (held, wanted) for rectangles in side for part in rectangles])
    sizes = grid.sizes()
    ranks = len(held)
    # By side, rank and cell: the number of the rank's rectangle that has the cell. No part spans two rectangles.
    number = np.full((2, ranks, *grid.shape), -1, np.int32)
    for side, placed in enumerate((held, wanted)):
        for rank, rectangles in enumerate(placed):
            for i, part in enumerate(rectangles):
                if part.size:
                    number[(side, rank, *grid.cells(part))] = i
    has, wants = np.any(number >= 0, axis=1)
    for lacking in grid.rectangles(wants & ~has)[:1]:
        raise UsageError(
            f"ranks hold {sizes[has].sum()} of its {sizes.sum()} elements; is its sharding right? "
            f"No rank holds the one at {lacking.start}"
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
    """The number of rounds in which no rank sends or receives more than ``most`` elements per round.

    0 if nothing has to be sent. A portion of a route has at least one element, until none are left.
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


# --- A rank's part in one round of a transfer: a flat piece, and the places of its elements in the rank's blocks


Blocks = Mapping[str, Sequence[Array]]  #: by name, an array for each rectangle that a rank holds, in their order


@dataclass(frozen=True)
class Copy:
    """Consecutive elements of a flat array that are a rectangle of one of a rank's blocks."""

    elements: slice  #: their slice of the flat array
    shape: tuple[int, ...]
    name: str
    number: int  #: which of the rank's blocks of that name
    index: tuple  #: their place in the block

    def of(self, flat: Array) -> Array:
        """Its elements in the flat array, in their shape: a view."""
        return flat[self.elements].reshape(self.shape)

    def at(self, blocks: Blocks) -> Array:
        """Its elements in the rank's blocks: a view."""
        return blocks[self.name][self.number][self.index]


@dataclass(frozen=True)
class Segment:
    """The elements of a piece that one route brings to, or from, one other rank."""

    route: Multicast
    first: int  #: its first element in the piece
    size: int
    copies: tuple[Copy, ...]  #: counted from ``first``
    link: tuple[int, int] = (0, 0)  #: start and stop in the piece of all elements to, or from, that rank

    def of(self, piece: Array, number: int = 0, several: int = 1) -> Array:
        """Its elements of a piece; if ``several`` sets lie side by side in each link, those of set ``number``."""
        start, stop = self.link
        first = self.first + (several - 1) * start + number * (stop - start)
        return piece[first : first + self.size]

    def pack(self, blocks: Blocks, flat: Array) -> None:
        """Copy the elements from the rank's blocks to ``flat``."""
        for copy in self.copies:
            copy.of(flat)[...] = copy.at(blocks)

    def unpack(self, flat: Array, blocks: Blocks) -> None:
        """Copy the elements of ``flat`` to the rank's blocks."""
        for copy in self.copies:
            copy.at(blocks)[...] = copy.of(flat)

    def add(self, flat: Array, blocks: Blocks) -> None:
        """Add the elements of ``flat`` to the rank's blocks."""
        for copy in self.copies:
            add(copy.of(flat), copy.at(blocks))


@dataclass(frozen=True)
class Piece:
    """All elements that a rank sends, or receives, in a round: segments in the order of the other ranks."""

    splits: tuple[int, ...]  #: elements for, or from, each rank
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return sum(self.splits)


def make_segment(
    placement: Placement, rank: int, route: Multicast, first: int, number: int, of: int, count: int = 1
) -> Segment:
    """Portion ``number`` of ``of`` of a route, or ``count`` of them, with its places in a rank's blocks."""
    copies, size = [], 0
    for name, part in route.portion(number, of, count):
        held = placement[name].held[rank]
        block = 0 if len(held) == 1 else next(i for i, rectangle in enumerate(held) if part in rectangle)
        end, within = size + part.size, part.within(held[block])
        copies.append(Copy(slice(size, end), part.shape, name, block, (..., *within.index)))  # a view, of 0-d, too
        size = end
    return Segment(route, first, size, tuple(copies))


def sent_piece(
    placement: Placement, rank: int, routes: Sequence[Multicast], number: int, of: int, count: int = 1
) -> Piece:
    """The piece that a rank sends in a round, or in ``count`` rounds from it at once."""
    mine = [route for route in routes if route.sender == rank]
    links = [[route for route in mine if other in route.receivers] for other in range(placement.ranks)]
    return _piece(placement, rank, links, number, of, count)


def received_piece(
    placement: Placement, rank: int, routes: Sequence[Multicast], number: int, of: int, count: int = 1
) -> Piece:
    """The piece that a rank receives in a round, or in ``count`` rounds from it at once."""
    mine = [route for route in routes if rank in route.receivers]
    links = [[route for route in mine if route.sender == other] for other in range(placement.ranks)]
    return _piece(placement, rank, links, number, of, count)


def _piece(
    placement: Placement, rank: int, links: Sequence[Sequence[Multicast]], number: int, of: int, count: int
) -> Piece:
    segments, splits, first = [], [], 0
    for other, routes in enumerate(links):
        start, on_link = first, []
        for route in routes if other != rank else ():
            on_link.append(make_segment(placement, rank, route, first, number, of, count))
            first += on_link[-1].size
        segments += [replace(segment, link=(start, first)) for segment in on_link]
        splits.append(first - start)
    return Piece(tuple(splits), tuple(segments))


def add(x: Array, place: Array) -> None:
    """``place += x``, where ``place`` may be a 0-d view."""
    backend_of(place).xp.add(place, x, out=place)


def copy_unless_there(x: Array, place: Array) -> None:
    """``place[...] = x``, unless ``x`` is that memory already, as the inside of a block with a halo may be."""
    both = isinstance(x, np.ndarray) and isinstance(place, np.ndarray)
    if not (both and address_of(x) == address_of(place) and x.strides == place.strides):
        place[...] = x


def new_blocks(placement: Placement, rank: int, backend: Backend, *, zero: bool = False) -> Blocks:
    """New blocks of a rank, zero or uninitialized."""
    make = backend.xp.zeros if zero else backend.empty
    return {name: [make(part.shape, array.dtype) for part in array.held[rank]] for name, array in placement.items()}


def backend_of_blocks(placement: Placement, blocks: Blocks) -> Backend | None:
    """The backend of the first block; None if the rank has no blocks."""
    return next((backend_of(block) for name in placement for block in blocks.get(name, ())), None)


def check_blocks(placement: Placement, group: Group, blocks: Blocks) -> Backend | None:
    """Raise UsageError unless ``blocks`` match the placement on this rank. Returns the backend of the first block."""
    if placement and group.size != placement.ranks:
        raise UsageError(f"transfer over {group.axes!r}, {group.size} ranks: it is planned for {placement.ranks}")
    for name, array in placement.items():
        arrays, held = blocks.get(name, ()), array.held[group.rank]
        if [(x.shape, x.dtype) for x in arrays] != [(rectangle.shape, array.dtype) for rectangle in held]:
            actual = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
            expected = ", ".join(f"{array.dtype}{list(rectangle.shape)}" for rectangle in held)
            raise UsageError(
                f"transfer: the blocks of {name} on rank {group.rank} are {actual or 'none'}; the placement has "
                f"{expected or 'none'}"
            )
    return backend_of_blocks(placement, blocks)
