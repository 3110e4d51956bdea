"""The planned exchange from one placement of arrays to another, and its adjoint, which adds.

A plan is a pure function of the two placements, so that all ranks make the same plan. Every rank receives, once, the
elements of its new placement that its old one lacks. The exchange has rounds, so that beside its blocks a rank holds no
more than one piece to send and one received piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.comm import Group
from spmd_engine.comm.blocks import reduce_into
from spmd_engine.comm.pending import Deferred, Pending
from spmd_engine.errors import UsageError, one_of
from spmd_engine.sharding.placement import Placement
from spmd_engine.sharding.routes import (
    Blocks,
    Copy,
    Multicast,
    Piece,
    Segment,
    add,
    backend_of_blocks,
    check_blocks,
    copy_unless_there,
    count_rounds,
    find_routes,
    make_segment,
    new_blocks,
    received_piece,
    sent_piece,
)

PIECE = 32 << 20  # bytes

#: A transfer: yields the sent piece of each round, with its split by rank; takes the received one; returns new blocks.
Steps = Generator[tuple[Array, tuple[int, ...]], Array | None, Blocks]


def plan_transfer(
    source: Placement,
    target: Placement,
    *,
    nodes: Sequence[Hashable] | None = None,
    piece_bytes: int = PIECE,
    from_owners: bool = False,
) -> TransferPlan:
    """The plan from the arrays of ``source`` to those of ``target``, placed on ranks of the same group.

    A rank keeps the elements that it has; it prefers to receive from ranks of its own node (``nodes``: an identifier of
    each rank's node), and these share the work. ``from_owners``: only owners send, so that the adjoint leaves the whole
    sum with the one owner of an element.

    In a round, no rank sends or receives more than ``piece_bytes``, but at least one element of what one rank sends to
    the same ranks.

    Raises UsageError for names, shapes or dtypes that differ, and where a rank wants elements that no rank has.
    """
    for name, wanted in target.items():
        if name not in source:
            raise UsageError(f"transfer: no rank has {name!r}; {one_of(name, source)}")
        held = source[name]
        if (held.shape, held.dtype) != (wanted.shape, wanted.dtype):
            raise UsageError(
                f"transfer: {name} is {held.dtype}{list(held.shape)} before and {wanted.dtype}{list(wanted.shape)} "
                "after; a transfer moves elements and changes nothing else"
            )
    if target and source.ranks != target.ranks:
        raise UsageError(
            f"transfer from {source.ranks} ranks to {target.ranks}: say by Placement.on(...) which ranks of one group "
            "they are"
        )
    if from_owners:
        source.checked()
    routes = find_routes(source, target, nodes if nodes is not None else [0] * source.ranks, from_owners)
    rounds = {
        dtype: count_rounds(multicasts, source.ranks, max(1, piece_bytes // max(1, dtype.itemsize)))
        for dtype, multicasts in routes.items()
    }
    return TransferPlan(source, target, routes, rounds)


class PlannedExchange(ABC):
    """An exchange of blocks from one placement to another, in rounds: a plan, or its adjoint."""

    def execute(
        self, group: Group, blocks: Blocks, *, out: Blocks | None = None, like: Backend = CPU, label: str = "transfer"
    ) -> Blocks:
        """This rank's blocks of ``target``, in ``out`` or new, from its ``blocks`` of ``source``. Collective.

        By name, an array for each rectangle that this rank holds. Blocks of ``source`` may lie in those of ``out`` at
        their own place, as the inside of a block with a halo does. ``like``: the backend of new blocks on a rank
        without old ones. Raises UsageError for blocks that do not match the placement.
        """
        return _carry_out(self._steps(group, blocks, out, like), group, label)

    def start(
        self, group: Group, blocks: Blocks, *, out: Blocks | None = None, like: Backend = CPU, label: str = "transfer"
    ) -> Pending | Deferred:
        """``execute`` without waiting for it: an operation whose ``wait()`` returns the blocks once. Of several rounds,
        the first runs meanwhile."""
        steps = self._steps(group, blocks, out, like)
        try:
            packed, splits = next(steps)
        except StopIteration as stop:
            return Pending.completed(stop.value)
        first = group.start_all_to_all(packed, splits=splits, label=label)
        return Deferred(first, lambda result: _carry_out(steps, group, label, result[0]))

    @abstractmethod
    def _steps(self, group: Group, blocks: Blocks, out: Blocks | None, like: Backend) -> Steps:
        """Yields the sent piece of each round and takes the received one; returns this rank's blocks of the target."""


@dataclass(frozen=True)
class TransferPlan(PlannedExchange):
    """The result of ``plan_transfer``: made once, the same on every rank, and executed any number of times."""

    source: Placement
    target: Placement
    routes: Mapping[np.dtype, tuple[Multicast, ...]]
    rounds: Mapping[np.dtype, int]  #: collectives, in which every rank takes part
    _cache: dict[tuple, Any] = field(default_factory=dict, repr=False, compare=False)

    def bytes_sent(self, rank: int) -> int:
        """The bytes that a rank sends, as the ledger counts them."""
        return sum(
            route.size * dtype.itemsize * sum(to != rank for to in route.receivers)
            for dtype, route in self._all_routes()
            if route.sender == rank
        )

    def bytes_received(self, rank: int) -> int:
        """The bytes that a rank receives: the elements that it lacks."""
        return sum(
            route.size * dtype.itemsize
            for dtype, route in self._all_routes()
            if rank in route.receivers and route.sender != rank
        )

    def adjoint(self) -> Adjoint:
        """The transposed operation: back along the same routes, and adding the copies that several ranks received."""
        return Adjoint(self)

    def execute_all(self, group: Group, several: Sequence[tuple[Blocks, Blocks]], *, label: str = "transfer") -> None:
        """``execute`` for several sets of blocks, each with its ``out``, in as many collectives as for one.

        Pieces are as many times as large, and are not cached.
        """
        _carry_out(self._steps_of_all(group, several, CPU, keep=False), group, label)

    def part(self, rank: int, start: int, stop: int, of: int) -> PartOfTransfer:
        """Portions ``start`` up to, and without, ``stop`` of the ``of`` even portions of each route."""
        pieces = [
            [make(placement, rank, routes, start, of, stop - start) for routes in self.routes.values()]
            for make, placement in ((sent_piece, self.source), (received_piece, self.target))
        ]
        return PartOfTransfer(tuple(self.routes), *map(tuple, pieces))

    def _steps(self, group: Group, blocks: Blocks, out: Blocks | None, like: Backend) -> Steps:
        if out is None:
            out = new_blocks(self.target, group.rank, backend_of_blocks(self.source, blocks) or like)
        return self._steps_of_all(group, [(blocks, out)], like, keep=True)

    def _steps_of_all(
        self, group: Group, several: Sequence[tuple[Blocks, Blocks]], like: Backend, *, keep: bool
    ) -> Steps:
        """Returns the target's blocks of the last set."""
        for blocks, out in several:
            like = check_blocks(self.source, group, blocks) or like
            check_blocks(self.target, group, out)
            for _, old, new in self._local_copies(group.rank):
                copy_unless_there(old.at(blocks), new.at(out))
        for dtype, number in self._rounds():
            coming = self._piece(received_piece, group.rank, dtype, number, keep=keep)
            leaving = self._piece(sent_piece, group.rank, dtype, number, keep=keep)
            received = yield _packed([blocks for blocks, _ in several], leaving, dtype, like)
            for segment in coming.segments:
                for which, (_, out) in enumerate(several):
                    segment.unpack(segment.of(received, which, len(several)), out)
        return several[-1][1]

    def _all_routes(self) -> Iterator[tuple[np.dtype, Multicast]]:
        return ((dtype, route) for dtype, routes in self.routes.items() for route in routes)

    def _local_copies(self, rank: int) -> Sequence[tuple[Multicast, Copy, Copy]]:
        """The elements that a rank keeps: their route, and their copies in its old and in its new blocks."""
        if ("kept", rank) not in self._cache:
            routes = [route for _, route in self._all_routes() if route.sender == rank and rank in route.receivers]
            both = [[make_segment(end, rank, route, 0, 0, 1) for route in routes] for end in (self.source, self.target)]
            self._cache["kept", rank] = [
                (route, *copies)
                for route, old, new in zip(routes, *both, strict=True)
                for copies in zip(old.copies, new.copies, strict=True)
            ]
        return self._cache["kept", rank]

    def _rounds(self) -> Iterator[tuple[np.dtype, int]]:
        return ((dtype, number) for dtype, rounds in self.rounds.items() for number in range(rounds))

    def _piece(
        self, make: Callable[..., Piece], rank: int, dtype: np.dtype, number: int, *, keep: bool = True
    ) -> Piece:
        """What a rank sends (``sent_piece``) or receives (``received_piece``) in a round; ``keep`` caches the piece."""
        key = make, rank, dtype, number
        if key in self._cache:
            return self._cache[key]
        placement = self.source if make is sent_piece else self.target
        piece = make(placement, rank, self.routes[dtype], number, self.rounds[dtype])
        if keep:
            self._cache[key] = piece
        return piece

    def _own_segment(self, rank: int, route: Multicast, dtype: np.dtype, number: int) -> Segment:
        """The elements of a route's portion that a rank keeps, with their places in its new blocks; cached."""
        key = id(route), rank, number
        if key not in self._cache:
            self._cache[key] = make_segment(self.target, rank, route, 0, number, self.rounds[dtype])
        return self._cache[key]


@dataclass(frozen=True)
class Adjoint(PlannedExchange):
    """The transpose of a transfer: the copies of an element that several ranks received come back and are added.

    They are added in the order of the ranks, on the rank that sent the element: with ``from_owners``, on its owner. The
    adjoint of a gather is a reduce_scatter; of halos, the sum where they overlap. The result is new, or added to
    ``out``; elements that the transfer sent to no rank are zero. 16-bit floats are added in float32.
    """

    plan: TransferPlan

    @property
    def source(self) -> Placement:
        return self.plan.target

    @property
    def target(self) -> Placement:
        return self.plan.source

    def bytes_sent(self, rank: int) -> int:
        """The bytes that a rank sends, as the ledger counts them."""
        return self.plan.bytes_received(rank)

    def adjoint(self) -> TransferPlan:
        return self.plan

    def _steps(self, group: Group, blocks: Blocks, out: Blocks | None, like: Backend) -> Steps:
        plan, rank = self.plan, group.rank
        backend = check_blocks(self.source, group, blocks) or like
        result = new_blocks(self.target, rank, backend, zero=True) if out is None else out
        check_blocks(self.target, group, result)
        for route, old, new in plan._local_copies(rank):
            if len(route.receivers) == 1:  # elements with other receivers are added below
                add(new.at(blocks), old.at(result))
        for dtype, number in plan._rounds():
            leaving, coming = (plan._piece(side, rank, dtype, number) for side in (received_piece, sent_piece))
            received = yield _packed([blocks], leaving, dtype, backend)
            by_route: dict[int, list[Segment]] = {}
            for segment in coming.segments:
                by_route.setdefault(id(segment.route), []).append(segment)
            for segments in by_route.values():
                total = self._sum(segments, received, number, rank, blocks)
                segments[0].add(total, result)  # all segments of a route have the same places
        return result

    def _sum(self, segments: Sequence[Segment], received: Array, number: int, rank: int, blocks: Blocks) -> Array:
        """The sum, in the order of ranks, of the copies that one route returns in a round and this rank's own copy."""
        route, plan = segments[0].route, self.plan
        shares = [segment.of(received) for segment in segments]
        if rank in route.receivers:
            own_segment = plan._own_segment(rank, route, received.dtype, number)
            flat = backend_of(received).empty((own_segment.size,), received.dtype)
            own_segment.pack(blocks, flat)
            shares.insert(route.receivers.index(rank), flat)
        if len(shares) == 1:
            return shares[0]
        total = backend_of(received).empty(shares[0].shape, received.dtype)
        reduce_into(total, shares, "sum")
        return total


@dataclass(frozen=True)
class PartOfTransfer:
    """Some elements of a transfer, on one rank. Only ``exchange`` is collective: a rank that fails to pack or to unpack
    can tell the others."""

    dtypes: Sequence[np.dtype]
    leaving: Sequence[Piece]  #: by dtype
    coming: Sequence[Piece]

    def pack(self, several: Sequence[Blocks], backend: Backend) -> list[tuple[Array, tuple[int, ...]]]:
        """The elements to send, of several sets of blocks of the source."""
        return [_packed(several, piece, dtype, backend) for dtype, piece in zip(self.dtypes, self.leaving, strict=True)]

    @staticmethod
    def exchange(group: Group, packed: Sequence[tuple[Array, tuple[int, ...]]], label: str) -> list[Array]:
        """The received elements, for ``unpack``."""
        return [group.all_to_all(flat, splits=splits, label=label)[0] for flat, splits in packed]

    def unpack(self, received: Sequence[Array], several: Sequence[Blocks]) -> None:
        """Copy the received elements to their places in the sets of blocks of the target."""
        for flat, piece in zip(received, self.coming, strict=True):
            for segment in piece.segments:
                for which, blocks in enumerate(several):
                    segment.unpack(segment.of(flat, which, len(several)), blocks)


def _carry_out(steps: Steps, group: Group, label: str, received: Array | None = None) -> Blocks:
    """Run the rounds of a transfer, one after the other; those that follow what was ``received``, if any."""
    try:
        while True:
            packed, splits = steps.send(received)
            received, _ = group.all_to_all(packed, splits=splits, label=label)
    except StopIteration as stop:
        return stop.value


def _packed(
    several: Sequence[Blocks], leaving: Piece, dtype: np.dtype, backend: Backend
) -> tuple[Array, tuple[int, ...]]:
    """The flat piece that a rank sends in a round, and its split by rank."""
    packed = backend.empty((leaving.size * len(several),), dtype)
    for segment in leaving.segments:
        for which, blocks in enumerate(several):
            segment.pack(blocks, segment.of(packed, which, len(several)))
    return packed, tuple(size * len(several) for size in leaving.splits)
