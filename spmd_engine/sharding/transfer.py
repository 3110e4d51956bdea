"""The planned exchange from one placement of arrays to another, and its adjoint, which adds.

A plan is a pure function of the two placements, so that all ranks make the same. Every rank receives what its new
placement holds and its old one had not, once; in rounds, so that beside its blocks it holds no more than a piece that
leaves and a piece that comes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.comm.blocks import reduce_into
from spmd_engine.comm.group import Group
from spmd_engine.comm.pending import Pending
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
    given,
    make_segment,
    new_blocks,
    taken,
)

PIECE = 32 << 20  # bytes

#: A transfer: it yields what leaves in a round, and how much goes to whom; is sent what comes; returns the new blocks.
Steps = Generator[tuple[Array, tuple[int, ...]], Array | None, Blocks]


def plan_transfer(
    source: Placement,
    target: Placement,
    *,
    nodes: Sequence[Hashable] | None = None,
    piece_bytes: int = PIECE,
    from_owners: bool = False,
) -> TransferPlan:
    """How the arrays of ``target`` come about from those of ``source``, placed on ranks of the same group.

    A rank keeps what it has; of others it prefers those of its own node (``nodes``: of each rank, anything that
    tells its node from others), and these share the work. ``from_owners``: only owners give, so that the adjoint
    leaves the whole sum with the one owner of an element.

    In a round, no rank sends, or receives, more than ``piece_bytes``; but of all that one rank gives to the same
    ranks, one element at least.

    Raises UsageError for names, shapes or dtypes that differ, and where somebody wants what nobody has.
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
        dtype: count_rounds(each, source.ranks, max(1, piece_bytes // max(1, dtype.itemsize)))
        for dtype, each in routes.items()
    }
    return TransferPlan(source, target, routes, rounds)


class PlannedExchange(ABC):
    """What takes blocks from one placement to another, in rounds: a plan, or its adjoint."""

    def execute(
        self, group: Group, blocks: Blocks, *, out: Blocks | None = None, like: Backend = CPU, label: str = "transfer"
    ) -> Blocks:
        """This rank's blocks of ``target``, in ``out`` or new, from its ``blocks`` of ``source``. Collective.

        By name, an array for each rectangle that this rank holds. Those of ``source`` may lie in ``out``, where they
        belong there, as what is inside a halo does. ``like``: where new blocks are made by a rank that has none itself.
        Raises UsageError for blocks that are not those of the placement.
        """
        return _carry_out(self._steps(group, blocks, out, like), group, label)

    def start(
        self, group: Group, blocks: Blocks, *, out: Blocks | None = None, like: Backend = CPU, label: str = "transfer"
    ) -> UnderWay:
        """As ``execute``, to be waited for later. Of several rounds, the first is under way meanwhile."""
        return UnderWay(self._steps(group, blocks, out, like), group, label)

    @abstractmethod
    def _steps(self, group: Group, blocks: Blocks, out: Blocks | None, like: Backend) -> Steps:
        """Yields what leaves in each round and is sent what came; returns this rank's blocks of the target."""


@dataclass(frozen=True)
class TransferPlan(PlannedExchange):
    """What ``plan_transfer`` found: made once, the same on every rank, and executed as often as one likes."""

    source: Placement
    target: Placement
    routes: Mapping[np.dtype, tuple[Multicast, ...]]
    rounds: Mapping[np.dtype, int]  #: collectives, in which every rank takes part
    _made: dict[tuple, Any] = field(default_factory=dict, repr=False, compare=False)

    def bytes_sent(self, rank: int) -> int:
        """The bytes that a rank sends, as the ledger counts them."""
        return sum(
            route.size * dtype.itemsize * sum(to != rank for to in route.receivers)
            for dtype, route in self._all_routes()
            if route.sender == rank
        )

    def bytes_received(self, rank: int) -> int:
        """The bytes that a rank receives: all that it lacked."""
        return sum(
            route.size * dtype.itemsize
            for dtype, route in self._all_routes()
            if rank in route.receivers and route.sender != rank
        )

    def adjoint(self) -> Adjoint:
        """The transposed operation: back by the same routes, where what several had received is added up."""
        return Adjoint(self)

    def execute_all(self, group: Group, several: Sequence[tuple[Blocks, Blocks]], *, label: str = "transfer") -> None:
        """As ``execute``, of several times such blocks, each with its ``out``, in as many collectives as of one.

        Pieces are as many times as large, and are not kept for the next time.
        """
        _carry_out(self._steps_of_all(group, several, CPU, keep=False), group, label)

    def _steps(self, group: Group, blocks: Blocks, out: Blocks | None, like: Backend) -> Steps:
        if out is None:
            out = new_blocks(self.target, group.rank, backend_of_blocks(self.source, blocks) or like)
        return self._steps_of_all(group, [(blocks, out)], like, keep=True)

    def _steps_of_all(
        self, group: Group, several: Sequence[tuple[Blocks, Blocks]], like: Backend, *, keep: bool
    ) -> Steps:
        """Returns the last one's blocks of the target."""
        for blocks, out in several:
            like = check_blocks(self.source, group, blocks) or like
            check_blocks(self.target, group, out)
            for _, old, new in self._kept(group.rank):
                copy_unless_there(old.at(blocks), new.at(out))
        for dtype, number in self._rounds():
            coming = self._piece(taken, group.rank, dtype, number, keep=keep)
            leaving = self._piece(given, group.rank, dtype, number, keep=keep)
            received = yield _packed([blocks for blocks, _ in several], leaving, dtype, like)
            for segment in coming.segments:
                for which, (_, out) in enumerate(several):
                    segment.unpack(segment.of(received, which, len(several)), out)
        return several[-1][1]

    def _all_routes(self) -> Iterator[tuple[np.dtype, Multicast]]:
        return ((dtype, route) for dtype, routes in self.routes.items() for route in routes)

    def _kept(self, rank: int) -> Sequence[tuple[Multicast, Copy, Copy]]:
        """What a rank has already: by which route, where in its old blocks, and where in its new ones."""
        if ("kept", rank) not in self._made:
            routes = [each for _, each in self._all_routes() if each.sender == rank and rank in each.receivers]
            both = [[make_segment(side, rank, each, 0, 0, 1) for each in routes] for side in (self.source, self.target)]
            self._made["kept", rank] = [
                (route, *copies)
                for route, old, new in zip(routes, *both, strict=True)
                for copies in zip(old.copies, new.copies, strict=True)
            ]
        return self._made["kept", rank]

    def _rounds(self) -> Iterator[tuple[np.dtype, int]]:
        return ((dtype, number) for dtype, rounds in self.rounds.items() for number in range(rounds))

    def _piece(
        self, make: Callable[..., Piece], rank: int, dtype: np.dtype, number: int, *, keep: bool = True
    ) -> Piece:
        """What a rank gives (``make=given``) or takes (``taken``) in a round; may be kept for the next time."""
        key = make, rank, dtype, number
        if key in self._made:
            return self._made[key]
        placement = self.source if make is given else self.target
        piece = make(placement, rank, self.routes[dtype], number, self.rounds[dtype])
        if keep:
            self._made[key] = piece
        return piece

    def _own(self, rank: int, route: Multicast, dtype: np.dtype, number: int) -> Segment:
        """What a rank keeps of a route's portion in a round, as it lies in its new blocks; kept for the next time."""
        key = id(route), rank, number
        if key not in self._made:
            self._made[key] = make_segment(self.target, rank, route, 0, number, self.rounds[dtype])
        return self._made[key]


@dataclass(frozen=True)
class Adjoint(PlannedExchange):
    """The transpose of a transfer: what an element was given to several ranks as, comes back from them and is added.

    It is added up in the order of the ranks, and on the rank that gave it: with ``from_owners``, on its owner. Of a
    transfer that gathers, this is a reduce_scatter; of halos, the sum of what overlaps. Its blocks are new, or added to
    ``out``; what the transfer gave to nobody is zero. 16-bit floats are added up in float32.
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
        for route, old, new in plan._kept(rank):
            if len(route.receivers) == 1:  # what others have, too, is added with theirs
                add(new.at(blocks), old.at(result))
        for dtype, number in plan._rounds():
            leaving, coming = (plan._piece(side, rank, dtype, number) for side in (taken, given))
            received = yield _packed([blocks], leaving, dtype, backend)
            by_route: dict[int, list[Segment]] = {}
            for segment in coming.segments:
                by_route.setdefault(id(segment.route), []).append(segment)
            for segments in by_route.values():
                total = self._sum(segments, received, number, rank, blocks)
                segments[0].add(total, result)  # all of a route lie in the same places here
        return result

    def _sum(self, segments: Sequence[Segment], received: Array, number: int, rank: int, blocks: Blocks) -> Array:
        """What comes back by one route in one round, and this rank's own share, added up in the order of ranks."""
        route, plan = segments[0].route, self.plan
        shares = [segment.of(received) for segment in segments]
        if rank in route.receivers:
            own = plan._own(rank, route, received.dtype, number)
            flat = backend_of(received).empty((own.size,), received.dtype)
            own.pack(blocks, flat)
            shares.insert(route.receivers.index(rank), flat)
        if len(shares) == 1:
            return shares[0]
        total = backend_of(received).empty(shares[0].shape, received.dtype)
        reduce_into(total, shares, "sum")
        return total


class UnderWay:
    """A transfer that has begun. ``wait()`` returns this rank's blocks, and may be called again."""

    def __init__(self, steps: Steps, group: Group, label: str) -> None:
        self._steps, self._group, self._label = steps, group, label
        self._result: Blocks = {}
        self._pending: Pending | None = None
        self._go_on(None)

    def wait(self) -> Blocks:
        while self._pending is not None:
            self._go_on(self._pending.wait()[0])
        return self._result

    def _go_on(self, received: Array | None) -> None:
        try:
            packed, splits = self._steps.send(received)
            self._pending = self._group.start_all_to_all(packed, splits=splits, label=self._label)
        except StopIteration as stop:
            self._result, self._pending = stop.value, None


def _carry_out(steps: Steps, group: Group, label: str) -> Blocks:
    """Make all exchanges of a transfer, one after the other."""
    received = None
    try:
        while True:
            packed, splits = steps.send(received)
            received, _ = group.all_to_all(packed, splits=splits, label=label)
    except StopIteration as stop:
        return stop.value


def _packed(
    several: Sequence[Blocks], leaving: Piece, dtype: np.dtype, backend: Backend
) -> tuple[Array, tuple[int, ...]]:
    """The flat piece that leaves in a round, and how much of it goes to whom."""
    packed = backend.empty((leaving.size * len(several),), dtype)
    for segment in leaving.segments:
        for which, blocks in enumerate(several):
            segment.pack(blocks, segment.of(packed, which, len(several)))
    return packed, tuple(size * len(several) for size in leaving.splits)
