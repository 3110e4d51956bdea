"""A rank's part in one round of a transfer: a flat piece, and where in the rank's blocks its elements belong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError
from spmd_engine.sharding.placement import Placement
from spmd_engine.sharding.routes import Route

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

    route: Route
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


def make_segment(placement: Placement, rank: int, route: Route, first: int, number: int, of: int) -> Segment:
    """Portion ``number`` of ``of`` of a route, as it lies in a rank's blocks."""
    copies, size = [], 0
    for name, part in route.portion(number, of):
        held = placement[name].held[rank]
        block = 0 if len(held) == 1 else next(i for i, each in enumerate(held) if part in each)
        end, within = size + part.size, part.within(held[block])
        copies.append(Copy(slice(size, end), part.shape, name, block, (..., *within.index)))  # of a number, too, a view
        size = end
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
