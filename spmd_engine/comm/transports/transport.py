"""The protocol of a transport, which moves the data of agreed calls. It implements the collectives that a transport
lacks by all_gather and all_to_all.

A transport is one file of this folder and one line in ``dispatch.TRANSPORTS``: see "Add a transport" in
docs/collectives.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.blocks import reduce_into, span, spans
from spmd_engine.comm.communicators.communicator import Ranks
from spmd_engine.comm.connections import Connections, Tuning
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.shared_memory.slot_table import Entries

Parts = Sequence[slice]  #: of a flat array, by rank
REDUCTIONS = ("all_reduce", "reduce_scatter")


class Facts(NamedTuple):
    """Facts about an agreed call, equal on all ranks of its group."""

    size: int  #: bytes of the arrays of all ranks together, or of each rank's equal array
    ranks: int
    one_node: bool = False  #: whether all ranks are on one node and share memory
    even_nodes: bool = False  #: whether there are several nodes with equally many ranks, which share memory
    lengths_known: bool = True  #: whether all ranks knew the lengths of all arrays before the call
    inline: bool = False  #: whether the data of all ranks travelled with the agreement
    readable: bool = False  #: whether the ranks of a node can read one another's data
    host: bool = True  #: whether all data are in host memory
    nccl: bool = False  #: whether all data are on devices that NCCL connects
    in_rank_order: bool = False  #: whether all sums must have rank order
    tuning: Tuning = Tuning()


class AgreedCall(NamedTuple):
    """A call whose data a transport moves among ``ranks``: all ranks of a group, or those of one level of them."""

    signature: Signature
    number: int
    facts: Facts
    ranks: Ranks
    connections: Connections  #: of all ranks of the group
    transports: Sequence[type[Transport]]  #: all of them
    entries: Entries | None = None  #: of this node's ranks in their slot table, if there is one

    def transport(self) -> Transport:
        """The first of the transports that suits the call."""
        return self.by(next(kind for kind in self.transports if kind.suits(self.signature, self.facts)))

    def by(self, kind: type[Transport]) -> Transport:
        """The transport of this kind."""
        if not (kind.keeps_call_order or self.facts.one_node):
            self.connections.call_order.finish(self.number)
        return kind(self)


class Transport(ABC):
    """Moves the data of an agreed call among ``size`` ranks; this rank is ``rank``.

    Arrays are flat and contiguous, and their parts are slices by rank. The methods that move data are generators (see
    ``pending``). A transport implements all_gather, and all_to_all or reduce_scatter, and may override the other
    methods; ``suits`` refuses calls of a method that it lacks.
    """

    name: str  #: as ``show collective`` prints it
    keeps_call_order = False  #: whether it starts its transfers in the order of calls: see ``CallOrder``
    blocks: Sequence[Any] = ()  #: arrays of all ranks, if this rank can read them in place

    def __init__(self, call: AgreedCall) -> None:
        """Only after ``suits``, for one call."""
        self.rank, self.size, self.tuning = call.ranks.rank, call.ranks.size, call.facts.tuning

    @staticmethod
    @abstractmethod
    def suits(call: Signature, facts: Facts) -> bool:
        """Whether it can move the data of such a call, and is the best of those after it in ``dispatch.TRANSPORTS``.

        A pure function of its arguments, which are equal on all ranks.
        """

    @abstractmethod
    def all_gather(self, x: Array, parts: Parts) -> Steps:
        """Fill each other rank's part of ``x`` from that rank's ``x``."""

    def all_reduce(self, x: Array, out: Array, reduction: str) -> Steps:
        """``out`` = the reduction of ``x`` over ranks. ``out`` may be ``x``.

        A reduce_scatter, then an all_gather of the same parts; results are bit-identical on all ranks.
        """
        parts = self.split(x.size)
        yield from self.reduce_scatter(x, parts, out[parts[self.rank]], reduction)
        yield from self.all_gather(out, parts)

    def split(self, length: int) -> list[slice]:
        """The parts of an array in an all_reduce, by rank."""
        return [span(length, self.size, r) for r in range(self.size)]

    def all_to_all(self, x: Array, parts: Parts, out: Array, out_parts: Parts) -> Steps:
        """Send part r of ``x`` to each other rank r, and fill part r of ``out`` with the part that rank r sends.

        It does not read this rank's part of ``x``, nor write this rank's part of ``out``.
        """
        raise NotImplementedError

    def broadcast(self, x: Array, root: int) -> Steps:
        """Fill ``x`` from ``root``: scatter parts, then gather them, so that no rank sends n copies of ``x``."""
        scatters = self.size > 2  # otherwise the other rank gets all at once
        parts = self.split(x.size) if scatters else [slice(0, x.size)] * 2
        empty = [slice(0, 0)] * self.size
        outgoing, incoming = (parts, empty) if self.rank == root else (empty, list(empty))
        if self.rank != root:
            incoming[root] = parts[self.rank]
        yield from self.all_to_all(x, outgoing, x, incoming)
        if scatters:
            mine = [parts[self.rank]] * self.size
            mine[root] = slice(0, 0)  # it has all of them
            yield from self.all_to_all(x, mine, x, empty if self.rank == root else parts)

    def reduce_scatter(self, x: Array, parts: Parts, out: Array, reduction: str) -> Steps:
        """``out`` = the reduction over ranks of part ``rank`` of ``x``, in an order fixed by the transport.

        ``out`` may be this rank's part of ``x``, or have the dtype in which ``x`` is accumulated. This implementation
        is in rank order, in rounds of bounded memory.
        """
        step = max(1, self.tuning.piece // x.itemsize)
        space = backend_of(out).empty((self.size * min(step, out.size),), x.dtype)
        rounds = max(1, -(-max(part.stop - part.start for part in parts) // step))
        for i in range(rounds):
            target = out[i * step : (i + 1) * step]
            pieces = [slice(min(p.start + i * step, p.stop), min(p.start + (i + 1) * step, p.stop)) for p in parts]
            places = spans([target.size] * self.size)
            yield from self.all_to_all(x, pieces, space, places)
            if target.size:
                blocks = [space[place] for place in places]
                blocks[self.rank] = x[pieces[self.rank]]
                reduce_into(target, blocks, reduction)

    def end(self) -> Steps:
        """The last method of a call: continues when no other rank needs this rank's memory."""
        yield from ()
