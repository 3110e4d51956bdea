"""A rank's part in one round of a transfer: a flat piece, and where in the rank's blocks its elements belong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError
from spmd_engine.sharding.placement import Placement
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.sharding.routes import Route

Blocks = Mapping[str, Sequence[Array]]  #: by name, an array for each rectangle that a rank holds, in their order


@dataclass(frozen=True)
class Copy:
    """Consecutive elements of a flat array that are a rectangle of one of a rank's blocks."""

    first: int  #: of them, in the flat array
    name: str
    number: int  #: which of the rank's blocks of that name
    part: Rectangle  #: of the block

    def of(self, flat: Array) -> Array:
        """Its elements in the flat array, in their shape: a view."""
        return flat[self.first : self.first + self.part.size].reshape(self.part.shape)

    def at(self, blocks: Blocks) -> Array:
        """Its elements in the rank's blocks: a view."""
        return blocks[self.name][self.number][(..., *self.part.index)]


@dataclass(frozen=True)
class Segment:
    """What of a piece one route brings to, or from, one other rank."""

    route: Route
    first: int  #: element of the piece
    size: int
    copies: tuple[Copy, ...]  #: counted from ``first``

    def of(self, piece: Array) -> Array:
        return piece[self.first : self.first + self.size]

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


def make_segment(placement: Placement, rank: int, route: Route, first: int, number: int, of: int) -> Segment:
    """Portion ``number`` of ``of`` of a route, as it lies in a rank's blocks."""
    copies, size = [], 0
    for name, part in route.portion(number, of):
        held = placement[name].held[rank]
        block = 0 if len(held) == 1 else next(i for i, each in enumerate(held) if part in each)
        copies.append(Copy(size, name, block, part.within(held[block])))
        size += part.size
    return Segment(route, first, size, tuple(copies))


def given(placement: Placement, rank: int, routes: Sequence[Route], number: int, of: int) -> Piece:
    """What a rank sends in a round."""
    mine = [route for route in routes if route.sender == rank]
    links = [[route for route in mine if other in route.receivers] for other in range(placement.ranks)]
    return _piece(placement, rank, links, number, of)


def taken(placement: Placement, rank: int, routes: Sequence[Route], number: int, of: int) -> Piece:
    """What a rank receives in a round."""
    mine = [route for route in routes if rank in route.receivers]
    links = [[route for route in mine if route.sender == other] for other in range(placement.ranks)]
    return _piece(placement, rank, links, number, of)


def _piece(placement: Placement, rank: int, links: Sequence[Sequence[Route]], number: int, of: int) -> Piece:
    segments, splits, first = [], [], 0
    for other, routes in enumerate(links):
        begun = first
        for route in routes if other != rank else ():
            segments.append(make_segment(placement, rank, route, first, number, of))
            first += segments[-1].size
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


def check_blocks(placement: Placement, group: Group, blocks: Blocks) -> Backend | None:
    """Raise UsageError unless ``blocks`` are this rank's of the placement. Returns the backend of the first."""
    if placement and group.size != placement.ranks:
        raise UsageError(f"transfer over {group.axes!r}, {group.size} ranks: it is planned for {placement.ranks}")
    for name, array in placement.items():
        found = [(tuple(block.shape), block.dtype) for block in blocks.get(name, ())]
        placed = [(each.shape, array.dtype) for each in array.held[group.rank]]
        if found != placed:
            here, there = (", ".join(f"{dtype}{list(shape)}" for shape, dtype in each) for each in (found, placed))
            raise UsageError(
                f"transfer: the blocks of {name} on rank {group.rank} are {here or 'none'}; placed there are "
                f"{there or 'none'}"
            )
    return next((backend_of(block) for name in placement for block in blocks.get(name, ())), None)
