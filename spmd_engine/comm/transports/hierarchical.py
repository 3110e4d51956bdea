"""Collectives of ranks on several nodes: within a node by shared memory, between nodes in lanes.

Lane j consists of the j-th ranks of all nodes. Data leave a node in one lane only, already reduced over the node's
ranks: an all_reduce of S bytes on M nodes sends 2 S (M-1)/M bytes from each node; an exchange between all ranks sends
that times the number of a node's ranks.

Reductions combine first the ranks of a node, in their order in the group, then the nodes, as the lane's transport does.
(Hierarchical collectives: Cho et al., BlueConnect, 2019, section 4, with two levels.)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.blocks import merged, span, spans
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.shared_memory.cross_memory import fill, flat
from spmd_engine.comm.shared_memory.slot_table import REDUCED, UNREADABLE
from spmd_engine.comm.transports.transport import REDUCTIONS, AgreedCall, Facts, Parts, Transport


class Hierarchical(Transport):
    """Two transports: among the ranks of this node (``local``) and of this rank's lane (``lane``).

    An all_to_all does not take it: it would send as many bytes.

    Where ``local`` is shared memory, a rank writes only its lane's part of its memory until all have read the rest.
    """

    name = "hierarchical: within nodes, then between them"

    @staticmethod
    def suits(call: Signature, facts: Facts) -> bool:
        gathers_known_rows = call.operation == "all_gather" and call.axis == 0 and facts.lengths_known
        sends_once = call.operation == "broadcast" and facts.host
        splits_by_nodes = call.operation in REDUCTIONS or gathers_known_rows or sends_once
        return facts.even_nodes and splits_by_nodes and facts.size >= facts.tuning.hierarchical

    def __init__(self, call: AgreedCall) -> None:
        """Both levels have transports of their own, chosen like that of a call."""
        super().__init__(call)
        facts, lanes, table = call.facts, call.connections.lanes, call.connections.node_table
        assert lanes is not None and table is not None and call.entries is not None
        # A gather reads results, an all_reduce also arrays.
        operation, results = call.signature.operation, UNREADABLE not in table.result_arenas(call.number)
        readable = facts.readable or operation == "all_gather"
        readable = readable and (results or operation not in ("all_gather", "all_reduce"))
        within = facts._replace(one_node=True, even_nodes=False, readable=readable)
        size = facts.size // lanes.local.size
        between = facts._replace(even_nodes=False, size=size, ranks=lanes.lane.size)
        self._lanes, self._table, self._entries = lanes, table, call.entries
        self._call = call._replace(facts=within, ranks=lanes.local)
        self._local = self._call.transport()
        self._lane = call._replace(facts=between, ranks=lanes.lane).transport()
        self.split = call.connections.split

    def all_gather(self, x: Array, parts: Parts) -> Steps:
        """See ``Transport``: first the lane's parts, then the other lanes' parts from the node's ranks."""
        yield from self._lane.all_gather(x, [parts[r] for r in self._lanes.lane.members])
        yield from self._gather(x, parts)

    def gather_lanes(self, mine: Array, x: Array, parts: Parts) -> Steps:
        """Fill ``x`` from the lanes of this node; this one has ``mine``, its adjacent parts."""
        members = self._lanes.lane.members
        x[parts[members[0]].start : parts[members[-1]].stop] = mine
        yield from self._gather(x, parts)

    def _gather(self, x: Array, parts: Parts) -> Steps:
        for node in self._by_local_rank(parts):
            yield from self._local.all_gather(x, node)

    def reduce_scatter(self, x: Array, parts: Parts, out: Array, reduction: str) -> Steps:
        """See ``Transport``. 16-bit floats are sent between nodes as float32, so that they are rounded once."""
        lanes, backend, partial_reduction = self._lanes, backend_of(x), "sum" if reduction == "mean" else reduction
        wide, members = accumulated_in(out.dtype), lanes.lane.members
        places = spans([parts[r].stop - parts[r].start for r in members])
        sums, filled = backend.empty(places[-1].stop, wide), 0  # sums of this node, for each rank of the lane
        for node in self._by_local_rank(parts):
            mine = node[lanes.local.rank]
            place = slice(filled, filled := filled + mine.stop - mine.start)
            yield from self._local.reduce_scatter(x, node, sums[place], partial_reduction)
        total = out if out.dtype == wide else backend.empty(out.shape, wide)
        yield from self._lane.reduce_scatter(sums, places, total, partial_reduction)
        if reduction == "mean":
            total /= wide.type(self.size)
        if total is not out:
            out[...] = total

    def broadcast(self, x: Array, root: int) -> Steps:
        """See ``Transport``: the ranks of the root's node take a part of ``x`` each, which their lanes broadcast."""
        lanes, local = self._lanes, self._lanes.local
        home = next(i for i, node in enumerate(lanes.nodes) if root in node)
        parts = [span(x.size, local.size, j) for j in range(local.size)]
        mine, number, local_root = parts[local.rank], self._call.number, lanes.nodes[home].index(root)
        if root in local.members and self._local.blocks:
            if self.rank != root:
                fill(x[mine], flat(self._local.blocks[local_root])[mine])
        elif root in local.members:
            empty = [slice(0, 0)] * local.size
            incoming = [mine if r == local_root != local.rank else slice(0, 0) for r in range(local.size)]
            yield from self._local.all_to_all(x, parts if self.rank == root else empty, x, incoming)
        yield from self._lane.broadcast(x[mine], home)
        self._table.offer_result(number, x)
        yield from self._table.reach(number, REDUCED)
        facts = self._call.facts._replace(readable=UNREADABLE not in self._table.result_arenas(number))
        entries = replace(self._entries, exposed=True)
        joining = self._call._replace(facts=facts, entries=entries).transport()
        yield from joining.all_gather(x, parts)
        yield from joining.end()

    def end(self) -> Steps:
        yield from self._local.end()

    def _by_local_rank(self, parts: Parts) -> list[list[slice]]:
        """The parts of each lane, adjacent ones as one: lists of a part for each rank of a node."""
        lanes = (merged([parts[r] for r in lane]) for lane in zip(*self._lanes.nodes, strict=True))
        return list(map(list, zip_longest(*lanes, fillvalue=slice(0, 0))))
