"""Large collectives of ranks on several nodes: within a node by shared memory, between nodes in lanes.

Lane j consists of the j-th ranks of all nodes. Data leave a node in one lane only, already reduced over the node's
ranks: an all_reduce of S bytes on M nodes sends 2 S (M-1)/M bytes from each node; an exchange between all ranks sends
that times the number of a node's ranks.

Reductions combine first the ranks of a node, in their order in the group, then the nodes, in the order of their first
ranks.
(Hierarchical collectives: Cho et al., BlueConnect, 2019, section 4, with two levels.)
"""

from __future__ import annotations

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.blocks import spans
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.shared_memory.slot_table import UNREADABLE
from spmd_engine.comm.transports.transport import AgreedCall, Facts, Parts, Transport


class Hierarchical(Transport):
    """Two transports: among the ranks of this node (``local``) and of this rank's lane (``lane``).

    Only gathers and reductions take it: an all_to_all would send as many bytes.

    Where ``local`` is shared memory, a rank writes only its lane's part of its memory until all have read the rest.
    """

    name = "hierarchical: within nodes, then between them"
    keeps_call_order = True  # if its lane's does

    @staticmethod
    def suits(call: Signature, facts: Facts) -> bool:
        gathers_known_rows = call.operation == "all_gather" and call.axis == 0 and facts.lengths_known
        splits_by_nodes = call.operation in ("all_reduce", "reduce_scatter") or gathers_known_rows
        return facts.even_nodes and splits_by_nodes and facts.size >= facts.tuning.hierarchical

    def __init__(self, call: AgreedCall) -> None:
        """Both levels have transports of their own, chosen like that of a call."""
        super().__init__(call)
        facts, lanes, table = call.facts, call.connections.lanes, call.connections.node_table
        assert lanes is not None and table is not None
        gathers = call.signature.operation == "all_gather"  # then results are offered, not arrays
        readable = UNREADABLE not in table.result_arenas(call.number) if gathers else facts.readable
        within = facts._replace(one_node=True, even_nodes=False, library=False, readable=readable)
        size, library = facts.size // lanes.local.size, call.connections.lane_library
        between = facts._replace(even_nodes=False, library=library is not None, size=size, ranks=lanes.lane.size)
        self._lanes = lanes
        self._local = call._replace(facts=within, ranks=lanes.local, library=None).transport()
        self._lane = call._replace(facts=between, ranks=lanes.lane, library=library).transport()

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
            total /= wide.type(self.size)
        if total is not out:
            out[...] = total

    def end(self) -> Steps:
        yield from self._local.end()
