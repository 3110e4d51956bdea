"""Large collectives of ranks on several nodes: within a node by shared memory, between nodes in lanes.

Lane j consists of the j-th ranks of all nodes. Data leave a node in one lane only, already reduced over the node's
ranks: an all_reduce of S bytes on M nodes sends 2 S (M-1)/M bytes from each node; an exchange between all ranks sends
that times the number of a node's ranks.

Reductions combine first the ranks of a node, in their order in the group, then the nodes, in the order of their first
ranks.
(Hierarchical collectives: Cho et al., BlueConnect, 2019, section 4, with two levels.)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.comm.blocks import spans
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.shared_memory.slot_table import SlotTable
from spmd_engine.comm.transports.messages import MessagePart
from spmd_engine.comm.transports.transport import Parts, Transport

if TYPE_CHECKING:
    from spmd_engine.comm.communicators.communicator import Communicator


def even_nodes(hosts: Sequence[Hashable]) -> list[list[int]] | None:
    """Ranks by nodes, for one node or several nodes with equally many ranks, at least two; otherwise None."""
    nodes: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    sizes = set(map(len, nodes.values()))
    return list(nodes.values()) if len(nodes) == 1 or (len(sizes) == 1 and 1 not in sizes) else None


class Lanes:
    """A group's ranks by nodes: ``nodes`` from ``even_nodes``, ``table`` of this rank's node."""

    def __init__(self, comm: Communicator, nodes: Sequence[Sequence[int]], table: SlotTable) -> None:
        self.nodes, self.table, self.rank, self.size = nodes, table, comm.rank, comm.size
        node_ranks = next(node for node in nodes if comm.rank in node)
        table.ranks = node_ranks
        self.local = MessagePart(comm, node_ranks)  #: the ranks of this node
        #: the ranks of all nodes with this rank's local rank
        self.lane = MessagePart(comm, [node[self.local.rank] for node in nodes])


class Hierarchical(Transport):
    """Two transports: among the ranks of this node (``local``) and of this rank's lane (``lane``).

    Only gathers and reductions take this route (see ``dispatch``): an all_to_all would send as many bytes.

    Where ``local`` is shared memory, a rank writes only its lane's part of its memory until all have read the rest.
    """

    def __init__(self, lanes: Lanes, local: Transport, lane: Transport) -> None:
        self.rank, self.size = lanes.rank, lanes.size
        self._lanes, self._local, self._lane = lanes, local, lane

    def all_gather(self, x: Array, parts: Parts, *, last: bool = True) -> Steps:
        """See ``Transport``: first the lane's parts, then the other lanes' parts from the node's ranks."""
        yield from self._lane.all_gather(x, [parts[r] for r in self._lanes.lane.members])
        for node in self._lanes.nodes:
            yield from self._local.all_gather(x, [parts[r] for r in node])

    def reduce_scatter(self, x: Array, parts: Parts, out: Array, reduction: str, *, last: bool = True) -> Steps:
        """See ``Transport``. 16-bit floats are sent between nodes as float32, so that they are rounded once."""
        lanes, backend, partial_reduction = self._lanes, backend_of(x), "sum" if reduction == "mean" else reduction
        wide, members = accumulated_in(out.dtype), lanes.lane.members
        places = spans([parts[r].stop - parts[r].start for r in members])
        sums = backend.empty((places[-1].stop,), wide)  # sums of this node, for each rank of the lane
        for node, place in zip(lanes.nodes, places, strict=True):
            yield from self._local.reduce_scatter(x, [parts[r] for r in node], sums[place], partial_reduction)
        total = out if out.dtype == wide else backend.empty(out.shape, wide)
        yield from self._lane.reduce_scatter(sums, places, total, partial_reduction, last=last)
        if reduction == "mean":
            total /= wide.type(lanes.size)
        if total is not out:
            out[...] = total

    def end(self) -> Steps:
        yield from self._local.end()
