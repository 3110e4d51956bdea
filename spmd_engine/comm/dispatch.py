"""The route of a call's data: a pure function of the call and of facts that all ranks of its group know.

``choose`` decides once for a call, after the ranks have agreed on it (a repeated call keeps the route), and again for
each of the two levels of a hierarchical call. ``show collective`` draws the same function. ``Routing`` collects the
facts, and creates the transport of the route.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmd_engine.arrays import dtypes
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.agreement.call_agreement import MAX_DIMS, Agreed, Agreement, NumberedCall, Signature
from spmd_engine.comm.blocks import Reducer, reducer, spans
from spmd_engine.comm.pending import TIMEOUT, Condition, Steps
from spmd_engine.comm.transports.hierarchical import Hierarchical
from spmd_engine.comm.transports.messages import Messages, Ranks
from spmd_engine.comm.transports.nccl import NcclTransport, QueuedCall
from spmd_engine.comm.transports.shared_memory import SharedMemory
from spmd_engine.comm.transports.transport import Transport
from spmd_engine.errors import UsageError

if TYPE_CHECKING:
    from spmd_engine.comm.communicators.communicator import Communicator
    from spmd_engine.comm.shared_memory.slot_table import SlotTable
    from spmd_engine.comm.transports.mpi import NonblockingCollectives
    from spmd_engine.comm.transports.nccl import NcclRanks


class Route(Enum):
    """How the data of a call travel. All but the first are files of ``transports``."""

    INLINE = "inline with the agreement"  # on one node in the slot table, which is also shared memory
    SHARED_MEMORY = "shared memory"
    HIERARCHICAL = "hierarchical: within nodes, then between them"
    MPI = "the MPI library's nonblocking collective"
    NCCL = "NCCL"  # between devices
    MESSAGES = "messages"


@dataclass(frozen=True)
class Tuning:
    """Thresholds in bytes, unless stated otherwise. They must be equal on all ranks, as routes follow from them."""

    #: Largest payload of all ranks together that travels inline between nodes, so that a small call is one exchange.
    with_agreement: int = 1 << 14
    #: Largest payload of a node's ranks together that every rank reduces completely. Above it each rank reduces a part,
    #: which takes one more phase.
    reduced_by_all: int = 1 << 19
    #: Largest block, in collectives without reduction, that a rank reads inline from the slot table. It reads larger
    #: blocks in place, if possible: a system call then costs less than a second copy.
    copied_to_table: int = 64 << 10
    #: Largest array that a rank copies into shared memory because the other ranks cannot read it in place.
    copied: int = 1 << 22
    #: Smallest array, unsharded, that takes the hierarchical route.
    hierarchical: int = 1 << 16
    #: Bytes from each rank to each other rank below which the MPI library moves the data. The library takes less time
    #: than our messages for many small blocks, more for few large ones (4 MiB on 4 ranks: 2.5x; 64 KiB on 32: 0.6x).
    by_library: int = 1 << 14
    #: Bytes of each rank's block that a rank receives before it reduces them. Bounds the memory of a reduction.
    piece: int = 4 << 20
    #: Largest number of ranks for which ranks sum in rank order on the MPI route; above it the library sums.
    #: Not measured: for 32 blocks of 16 KiB, all_to_all brings each rank 512 KiB, which fits into its cache.
    in_rank_order: int = 32
    #: Largest count or displacement passed to the MPI library. Larger arrays are sent as messages.
    largest_count: int = (1 << 31) - 1


class Facts(NamedTuple):
    """Facts about an agreed call, equal on all ranks of its group."""

    size: int  #: bytes of the arrays of all ranks together, or of each rank's equal array
    ranks: int
    one_node: bool = False  #: whether all ranks are on one node and share memory
    even_nodes: bool = False  #: whether there are several nodes with equally many ranks, which share memory
    library: bool = False  #: whether there is an MPI library
    lengths_known: bool = True  #: whether all ranks knew the lengths of all arrays before the call
    inline: bool = False  #: whether the data of all ranks travelled with the agreement
    readable: bool = False  #: whether the ranks of a node can read one another's data
    host: bool = True  #: whether all data are in host memory
    nccl: bool = False  #: whether all data are on devices that NCCL connects
    tuning: Tuning = Tuning()


def choose(call: Signature, facts: Facts) -> Route:
    """The route of a call's data."""
    if facts.inline and facts.host:
        return Route.INLINE
    if facts.nccl:
        return Route.NCCL
    if facts.one_node:
        return Route.SHARED_MEMORY if facts.readable else Route.MESSAGES
    tuning, size = facts.tuning, facts.size
    gathers_known_rows = call.operation == "all_gather" and call.axis == 0 and facts.lengths_known
    splits_by_nodes = call.operation in ("all_reduce", "reduce_scatter") or gathers_known_rows
    if facts.even_nodes and splits_by_nodes and size >= tuning.hierarchical:
        return Route.HIERARCHICAL
    largest = size * facts.ranks if call.operation == "all_to_all" else size  # one rank may receive the data of all
    small = 0 < size < tuning.by_library * facts.ranks and largest <= tuning.largest_count
    return Route.MPI if facts.library and facts.host and small else Route.MESSAGES


def inline_limit(operation: str, ranks: int, room: int, readable: bool, tuning: Tuning) -> int:
    """The most bytes of a rank's array that travel inline, at most ``room``.

    ``readable``: whether the other ranks can read their parts of the array in place.
    """
    if operation == "all_reduce":
        return min(room, tuning.reduced_by_all // ranks)
    if operation == "reduce_scatter" or not readable:
        return room
    return min(room, tuning.copied_to_table * (ranks if operation == "all_to_all" else 1))


class Routing:
    """Agreement on the calls of one group, and the routes of their data."""

    def __init__(
        self, comm: Communicator, axes: str, check: bool, deterministic: bool, timeout: float | None = TIMEOUT
    ) -> None:
        self.comm, self.axes, self.rank, self.size = comm, axes, comm.rank, comm.size
        self.one_node = comm.table is not None
        self.spins = self.one_node and comm.spin_tests > 0 and comm.size > 1  #: whether blocking calls spin
        self._room = comm.table.room if comm.table is not None else comm.tuning.with_agreement // comm.size
        self.agreement, self._deterministic = Agreement(comm, axes, check), deterministic
        self._timeout = timeout

    def signature(self, operation: str, x: Array | None, **fields: Any) -> Signature:
        """The signature of a call of ``x``. Raises UsageError if ``x`` has too many dimensions."""
        if x is None:
            return Signature(operation, **fields)
        if x.ndim > MAX_DIMS:
            raise UsageError(f"{operation}: the array has {x.ndim} dimensions; at most {MAX_DIMS} are supported")
        # Other ranks can read x in place if it is not sliced and all ranks spin: this rank then waits for their reads.
        unsliced, table = not (fields.get("axis") or fields.get("concat_axis")), self.comm.table
        in_place = unsliced and self.spins and table is not None and table.neighbours.cross_memory is not None
        host = isinstance(x, np.ndarray)
        inline = host and x.nbytes <= inline_limit(operation, self.size, self._room, in_place, self.comm.tuning)
        fields.setdefault("inline", x.nbytes if inline else 0)
        return Signature(operation, dtype=dtypes.describe(x.dtype), shape=x.shape, host=host, **fields)

    def table_to_offer(self, signature: Signature, local: Array, size: int) -> SlotTable | None:
        """The slot table in which this rank offers ``local`` in a call of ``size`` bytes; None: it offers nothing."""
        if signature.inline or not isinstance(local, np.ndarray):
            return None
        return self.comm.node_table if self.one_node or size >= self.comm.tuning.hierarchical else None

    def numbers(self, number: int, values: Sequence[int]) -> Steps:
        """Receive one number from each rank, and send ``values[r]`` to rank r, as part of call ``number``."""
        sent, received = np.array(values, np.int64), np.empty(len(values), np.int64)
        places = spans([1] * len(values))
        library = self.comm.collectives
        transport = library.of_call(number, False) if library is not None else Messages(self.comm, number)
        yield from transport.all_to_all(sent, places, received, places, last=False)
        received[self.rank] = sent[self.rank]
        return received.tolist()

    def transport(
        self, signature: Signature, number: int, agreed: Agreed, size: int, where: tuple[str, str, str]
    ) -> Transport | None:
        """The transport of an agreed call with ``size`` bytes of all ranks or of each; None if its data were inline.

        ``where``: operation, axes and label.
        """
        comm, table, entries = self.comm, self.comm.node_table, agreed.entries
        facts = Facts(
            size,
            comm.size,
            one_node=self.one_node,
            even_nodes=comm.lanes is not None,
            library=comm.collectives is not None,
            lengths_known=agreed.alike or agreed.sizes_known,
            inline=bool(agreed.blocks),
            readable=entries is not None and entries.readable,
            host=agreed.host,
            nccl=comm.nccl is not None and agreed.device,
            tuning=comm.tuning,
        )
        route = choose(signature, facts)
        if route is Route.INLINE:
            return None
        if route is Route.NCCL and comm.nccl is not None:
            work = self.queued(number, str(NumberedCall(number, signature)), where)
            return NcclTransport(comm.nccl, work, self._deterministic)
        memory = SharedMemory(table, number, entries) if table is not None and entries is not None else None
        return self._on_route(route, signature, number, facts, memory, comm, comm.collectives)

    def queued(self, number: int, what: str, where: tuple[str, str, str]) -> QueuedCall:
        """A call whose transfers NCCL queues; ``what``: its name and arguments; ``where``: operation, axes, label."""
        label = f" ({where[2]})" if where[2] else ""
        text = self.comm.progress.activity.called(*where)
        call = f"{what} over {self.axes!r}{label}, group rank {self.rank} of {self.size}"
        return QueuedCall(number, call, text, self._timeout)

    def _on_route(
        self,
        route: Route,
        signature: Signature,
        number: int,
        facts: Facts,
        memory: SharedMemory | None,
        ranks: Ranks,
        library: NonblockingCollectives | None,
    ) -> Transport:
        """The transport among ``ranks``. The facts say which of ``memory``, lanes and ``library`` exist."""
        lanes = self.comm.lanes
        if route is Route.SHARED_MEMORY and memory is not None:
            return memory
        if route is Route.MPI and library is not None:
            return library.of_call(number, self._deterministic)
        if route is Route.HIERARCHICAL and memory is not None and lanes is not None:
            library = self.comm.lane_collectives
            gathers = signature.operation == "all_gather"
            within = facts._replace(one_node=True, readable=memory.results_readable if gathers else facts.readable)
            between = facts._replace(
                even_nodes=False,
                size=facts.size // lanes.local.size,
                ranks=lanes.lane.size,
                library=library is not None,
            )
            near, far = choose(signature, within), choose(signature, between)
            return Hierarchical(
                lanes,
                self._on_route(near, signature, number, within, memory, lanes.local, None),
                self._on_route(far, signature, number, between, None, lanes.lane, library),
            )
        if route is not Route.MESSAGES:
            raise AssertionError(f"no transport for the route {route.name}")
        if not facts.one_node:
            self.comm.call_order.finish(number)
        return Messages(ranks, number)

    # --- arrays in memory that a transport can read

    def reducer(self, x: Array, op: str) -> Reducer:
        """The reducer of arrays like ``x``, on their device if the transport can access it."""
        return reducer(op, x.dtype, backend_of(x).xp if self.is_reachable(x) else np)

    def is_reachable(self, x: Array) -> bool:
        """Whether the transport can access the memory of ``x``."""
        return self.is_for_messages(x) or self.nccl_of(x) is not None

    def is_for_messages(self, x: Array) -> bool:
        """Whether messages can carry ``x``."""
        return isinstance(x, np.ndarray) or self.comm.device_aware

    def nccl_of(self, x: Array) -> NcclRanks | None:
        """What moves ``x`` by NCCL, if the arrays of the other ranks are on devices, too; None: nothing does."""
        return None if isinstance(x, np.ndarray) else self.comm.nccl

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
        table = self.comm.node_table
        return table is None or table.neighbours.can_read(pinned)
