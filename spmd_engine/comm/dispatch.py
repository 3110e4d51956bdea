"""The transport of a call's data: a pure function of the call and of facts that all ranks of its group know.

``choose`` decides once for a call, after the ranks have agreed on it (a repeated call keeps its transport); a
hierarchical call chooses from the same table for each of its two levels. ``show collective`` prints the same function.
``Routing`` collects the facts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd_engine.arrays import dtypes
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.comm.agreement.call_agreement import Agreed, Agreement
from spmd_engine.comm.agreement.signature import MAX_DIMS, Signature
from spmd_engine.comm.blocks import Reducer, reducer, spans
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.connections import Tuning, connections_of
from spmd_engine.comm.nccl_ranks import NcclRanks, QueuedCall
from spmd_engine.comm.pending import TIMEOUT, Condition, Steps
from spmd_engine.comm.shared_memory.slot_table import SlotTable
from spmd_engine.comm.transports.hierarchical import Hierarchical
from spmd_engine.comm.transports.messages import Messages
from spmd_engine.comm.transports.nccl import NcclTransport
from spmd_engine.comm.transports.rounds import MessageRounds
from spmd_engine.comm.transports.shared_memory import SharedMemory
from spmd_engine.comm.transports.transport import REDUCTIONS, AgreedCall, Facts, Transport
from spmd_engine.errors import UsageError

#: All transports. The first that ``suits`` a call moves its data; messages suit every call.
TRANSPORTS: Sequence[type[Transport]] = (
    NcclTransport,
    SharedMemory,
    Hierarchical,
    MessageRounds,
    Messages,
)


def choose(call: Signature, facts: Facts) -> type[Transport] | None:
    """The transport of a call's data; None: they have travelled inline, with the agreement, which on one node is the
    slot table in shared memory, between nodes a tree of messages."""
    if facts.inline and facts.host:
        return None
    return next(transport for transport in TRANSPORTS if transport.suits(call, facts))


def inline_limit(operation: str, ranks: int, room: int, tuning: Tuning) -> int:
    """The most bytes of a rank's array that travel inline on one node, at most ``room``."""
    return min(room, tuning.reduced_by_all // ranks) if operation == "all_reduce" else room


def inline_between_nodes(operation: str, ranks: int, senders: int, in_rank_order: bool, tuning: Tuning) -> int:
    """The most bytes of a rank's array that travel inline between nodes; in a reduction, in the dtype of its sums.

    ``senders``: the number of ranks that exchange messages, of all, or of each lane.
    """
    limit = tuning.inline_between(senders, 1 if operation in REDUCTIONS else ranks // senders)
    if operation == "all_to_all" and senders > 2:
        limit = min(limit, tuning.forwarded * ranks)
    if operation == "all_to_all" or (operation in REDUCTIONS and in_rank_order):
        limit = min(limit, tuning.with_agreement // ranks)
    return limit // ranks if operation == "all_gather" else limit


class Routing:
    """Agreement on the calls of one group, and the transports of their data."""

    def __init__(
        self, comm: Communicator, axes: str, check: bool, deterministic: bool, timeout: float | None = TIMEOUT
    ) -> None:
        self.comm, self.axes, self.rank, self.size = comm, axes, comm.rank, comm.size
        self.connections = connections = connections_of(comm)
        self.one_node = connections.table is not None
        self.spins = self.one_node and comm.spin_tests > 0 and comm.size > 1  #: whether blocking calls spin
        self._room = connections.node_table.room if connections.node_table is not None else sys.maxsize
        self.agreement, self.in_rank_order = Agreement(connections, axes, check), deterministic
        self._timeout = timeout

    def signature(self, operation: str, x: Array | None, **fields: Any) -> Signature:
        """The signature of a call of ``x``. Raises UsageError if ``x`` has too many dimensions."""
        if x is None:
            return Signature(operation, **fields)
        if x.ndim > MAX_DIMS:
            raise UsageError(f"{operation}: the array has {x.ndim} dimensions; at most {MAX_DIMS} are supported")
        host, tuning, size = isinstance(x, np.ndarray), self.connections.tuning, x.nbytes
        if self.one_node:
            limit = inline_limit(operation, self.size, self._room, tuning)
        else:
            senders = self.connections.senders.size
            limit = min(self._room, inline_between_nodes(operation, self.size, senders, self.in_rank_order, tuning))
            size = x.size * accumulated_in(x.dtype).itemsize if operation in REDUCTIONS else size
        inline = host and size <= limit
        fields.setdefault("inline", x.nbytes if inline else 0)
        return Signature(operation, dtype=dtypes.describe(x.dtype), shape=x.shape, host=host, **fields)

    def table_to_offer(self, signature: Signature, local: Array, size: int) -> SlotTable | None:
        """The slot table in which this rank offers ``local`` in a call of ``size`` bytes; None: it offers nothing."""
        if signature.inline or not isinstance(local, np.ndarray):
            return None
        connections = self.connections
        return connections.node_table if self.one_node or size >= connections.tuning.hierarchical else None

    def numbers(self, number: int, values: Sequence[int]) -> Steps:
        """Receive one number from each rank, and send ``values[r]`` to rank r, as part of call ``number``."""
        sent, received = np.array(values, np.int64), np.empty(len(values), np.int64)
        facts = Facts(sent.nbytes, self.size, tuning=self.connections.tuning)
        call = AgreedCall(Signature("all_to_all"), number, facts, self.comm, self.connections, TRANSPORTS)
        places, transport = spans([1] * len(values)), Messages(call)
        yield from transport.all_to_all(sent, places, received, places)
        received[self.rank] = sent[self.rank]
        return received.tolist()

    def transport(self, signature: Signature, number: int, agreed: Agreed, size: int) -> Transport | None:
        """The transport of an agreed call with ``size`` bytes of all ranks or of each; None if its data were inline."""
        connections, entries = self.connections, agreed.entries
        facts = Facts(
            size,
            self.size,
            one_node=self.one_node,
            even_nodes=connections.lanes is not None,
            lengths_known=agreed.alike or agreed.sizes_known,
            inline=bool(agreed.blocks) or agreed.answer is not None,
            readable=entries is not None and entries.readable,
            host=agreed.host,
            nccl=connections.nccl is not None and agreed.device,
            in_rank_order=self.in_rank_order,
            tuning=connections.tuning,
        )
        kind = choose(signature, facts)
        if kind is None:
            return None
        return AgreedCall(signature, number, facts, self.comm, connections, TRANSPORTS, entries).by(kind)

    @property
    def senders(self) -> list[int]:
        """The ranks that exchange messages with this one in an agreement, and this one."""
        senders = self.connections.senders
        return [senders.outer(rank) for rank in range(senders.size)]

    def by_rank(self, rows: np.ndarray) -> np.ndarray:
        """Rows of all ranks, which have come inline between nodes, in rank order."""
        lanes = self.connections.lanes
        return rows if lanes is None else rows[np.argsort(np.ravel(lanes.nodes))]

    def queued(self, number: int, what: str, where: tuple[str, str, str]) -> QueuedCall:
        """A call whose transfers NCCL queues; ``what``: its name and arguments; ``where``: operation, axes, label."""
        label = f" ({where[2]})" if where[2] else ""
        text = self.comm.progress.activity.called(*where)
        call = f"{what} over {self.axes!r}{label}, group rank {self.rank} of {self.size}"
        return QueuedCall(number, call, text, self._timeout)

    # --- arrays in memory that a transport can read

    def reducer(self, x: Array, op: str) -> Reducer:
        """The reducer of arrays like ``x``, on their device if the transport can access it."""
        return reducer(op, x.dtype, backend_of(x).xp if self.is_reachable(x) else np)

    def is_reachable(self, x: Array) -> bool:
        """Whether the transport can access the memory of ``x``."""
        return self.is_for_messages(x) or self.nccl_of(x) is not None

    def is_for_messages(self, x: Array) -> bool:
        """Whether messages can carry ``x``."""
        return isinstance(x, np.ndarray) or self.connections.device_aware

    def nccl_of(self, x: Array) -> NcclRanks | None:
        """What moves ``x`` by NCCL, if the arrays of the other ranks are on devices, too; None: nothing does."""
        return None if isinstance(x, np.ndarray) else self.connections.nccl

    def ready(self, x: Array, messages: bool = False) -> Steps:
        """``x``, contiguous in memory that the transport can read; ``messages``: whether messages carry it."""
        backend = backend_of(x)
        if not (backend.owns(x) and x.flags.c_contiguous):
            x = backend.xp.ascontiguousarray(x).reshape(x.shape)  # it makes scalars 1-D
        reachable = self.is_for_messages(x) if messages else self.is_reachable(x)
        return x if reachable else (yield from self.staged(x))

    def staged(self, x: Array) -> Steps:
        """Contiguous ``x`` in pinned host memory, or in memory that others can read, if the driver hides that one."""
        backend: Any = backend_of(x)  # a CudaBackend
        host, copied = backend.start_to_host(x)
        yield Condition(lambda: copied.done, lambda rank: True, messages=True)
        return host if self.others_can_read(host) else host.copy()

    def others_can_read(self, pinned: np.ndarray) -> bool:
        """Whether the node's other ranks can read such memory, if they do."""
        table = self.connections.node_table
        return table is None or table.neighbours.can_read(pinned)
