"""What the calls of a communicator's ranks use besides its messages: numbers, thresholds, and faster connections.

There is one such record for each communicator, which all groups of these ranks share. Without shared memory and NCCL,
calls need only the first lines of it, and all data travel by messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from spmd_engine.arrays.backend import CudaBackend
from spmd_engine.comm.agreement.tree import edges
from spmd_engine.comm.blocks import span
from spmd_engine.comm.communicators.communicator import Communicator, MessagePart, Ranks
from spmd_engine.comm.nccl_ranks import NcclRanks
from spmd_engine.comm.pending import CallOrder
from spmd_engine.comm.shared_memory.arena import Neighbours
from spmd_engine.comm.shared_memory.slot_table import SlotTable


@dataclass(frozen=True)
class Tuning:
    """Thresholds in bytes, unless stated otherwise. They must be equal on all ranks, as transports follow from them."""

    #: Most bytes that travel with the agreement between nodes, of all ranks together, or from rank 0 to its children.
    with_agreement: int = 1 << 17
    #: The most that the ranks of a node send together, where each sends the whole array.
    repeated_with_agreement: int = 1 << 14
    #: Largest part for each rank of an all_to_all that travels with it: parents also forward the parts of others.
    forwarded: int = 1 << 9
    #: Largest payload of a node's ranks together that every rank reduces completely. Above it each rank reduces a part,
    #: which takes one more phase.
    reduced_by_all: int = 1 << 19
    #: Largest array that a rank copies into shared memory because the other ranks cannot read it in place, or, in an
    #: all_reduce, because two copies take less time than a system call (1 MiB: 80 us against 98 us on an AMD EPYC).
    copied: int = 1 << 22
    #: Smallest array, unsharded, that takes the hierarchical transport.
    hierarchical: int = 1 << 11
    #: Least bytes from each rank to each other rank that are sent to all at once; fewer take log2(n) rounds.
    at_once: int = 1 << 13
    #: Bytes of each rank's block that a rank receives before it reduces them. Bounds the memory of a reduction.
    piece: int = 4 << 20

    def inline_between(self, senders: int, local: int = 1) -> int:
        """The most bytes of an array that each of so many ranks sends with the agreement between nodes; ``local``: the
        number of ranks on each node that send the same."""
        limit = self.with_agreement // max(1, len(edges(0, senders)[1]))
        return limit if local == 1 else min(limit, self.repeated_with_agreement) // local


def even_nodes(hosts: Sequence[Hashable]) -> list[list[int]] | None:
    """Ranks by nodes, for one node or several nodes with equally many ranks, at least two; otherwise None."""
    nodes: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    sizes = set(map(len, nodes.values()))
    return list(nodes.values()) if len(nodes) == 1 or (len(sizes) == 1 and 1 not in sizes) else None


class Lanes:
    """A communicator's ranks by nodes with equally many ranks. Lane j consists of the j-th ranks of all nodes."""

    def __init__(self, comm: Communicator, nodes: Sequence[Sequence[int]]) -> None:
        self.nodes = nodes
        self.local = MessagePart(comm, next(node for node in nodes if comm.rank in node))  #: the ranks of this node
        #: the ranks of all nodes with this rank's local rank
        self.lane = MessagePart(comm, [node[self.local.rank] for node in nodes])


class Connections:
    """See above, of the ranks of ``comm``.

    ``neighbours``: memory shared with the ranks of this node. ``node_table``: the slot table of those on this node;
    only for ``even_nodes``.
    """

    tuning = Tuning()

    def __init__(
        self, comm: Communicator, neighbours: Neighbours | None = None, node_table: SlotTable | None = None
    ) -> None:
        self.comm, self.neighbours, self.node_table = comm, neighbours, node_table
        self.calls = 0  #: collectives started so far; equal on all ranks
        self.call_order = CallOrder()  #: of calls that may use ``nccl``
        self.messages: defaultdict[tuple[str, int], count] = defaultdict(count)  #: numbers of those to, or from, a rank
        self.table: SlotTable | None = None  #: of all ranks, if they are on one node
        self.lanes: Lanes | None = None  #: if there are several nodes with equally many ranks
        if node_table is not None and node_table.size == comm.size:
            self.table = node_table
        elif node_table is not None:
            self.lanes = Lanes(comm, even_nodes(comm.hosts) or ())
            node_table.ranks = self.lanes.local.members
        self.ordered = False  #: whether calls need the call order
        self.device_aware = comm.is_device_aware  #: whether messages are arrays on devices
        self.nccl: NcclRanks | None = None  #: NCCL between the devices of the ranks
        self.transport_is_chosen = False  #: by ``device_transport.choose_transport``

    @property
    def senders(self) -> Ranks:
        """The ranks that exchange messages with this one in an agreement: of its lane, or all."""
        return self.lanes.lane if self.lanes is not None else self.comm

    def split(self, length: int) -> list[slice]:
        """Even parts of a length, by rank; those of a lane are adjacent."""
        nodes = self.lanes.nodes if self.lanes is not None else [[r] for r in range(self.comm.size)]
        places = {rank: j * len(nodes) + i for i, node in enumerate(nodes) for j, rank in enumerate(node)}
        return [span(length, self.comm.size, places[rank]) for rank in range(self.comm.size)]

    def next_call(self, text: int = 0) -> int:
        """The number of the call that begins now; ``text``: number of its description, see ``Activity.called``."""
        self.calls = number = self.calls + 1
        words = self.comm.line.words
        words[0], words[1] = number, text
        return number

    def empty(self, shape: Sequence[int], dtype) -> np.ndarray:
        """An uninitialized array, in memory that the node's ranks share, if there is room."""
        dtype = np.dtype(dtype)
        x = None
        if self.neighbours and not dtype.hasobject:
            with self.comm.progress.lock:
                x = self.neighbours.own.empty(shape, dtype)
        return x if x is not None else np.empty(shape, dtype)

    def set_transport(self, device_aware: bool, backend: CudaBackend | None) -> None:
        """Decide how device arrays travel: by NCCL from ``backend``'s device, if given; else by messages, directly if
        ``device_aware``. Collective; later subsets take this over."""
        self.device_aware = device_aware
        if backend is None or self.nccl is None or self.nccl.backend is not backend:
            if self.nccl is not None:
                self.nccl.close()
            self.nccl = None
            if backend is not None and self.comm.size > 1:
                self.nccl, self.ordered = NcclRanks(self.comm, self.call_order, backend), True

    def pass_on(self, subset: Communicator) -> None:
        """Let the ranks of a ``subset`` send device arrays as these do."""
        connections = connections_of(subset)
        connections.set_transport(self.device_aware, self.nccl.backend if self.nccl is not None else None)
        connections.transport_is_chosen = self.transport_is_chosen

    def close(self) -> None:
        """End their use. Collective."""
        self.set_transport(self.device_aware, None)
        if (table := self.node_table) is not None:
            with self.comm.progress.lock:
                table.neighbours.retire(table)


def connections_of(comm: Communicator) -> Connections:
    """Those of the ranks of ``comm``: messages alone, unless the communicator has more."""
    if comm.connections is None:
        comm.connections = Connections(comm)
    return comm.connections
