"""Large collectives of ranks on several nodes: within a node by memory, between nodes in lanes.

Lane j is made of the j-th ranks of all nodes. Whatever has to leave a node does so in one lane alone, already reduced
over the node's ranks: so an all_reduce of S bytes on M nodes takes 2 S (M-1)/M out of each, where an exchange between
all ranks takes as many times that as a node has ranks. All ranks together send what they otherwise would.

First the ranks of a node are combined, in their order in the group, then the nodes, in the order of their first ranks.
(Hierarchical collectives: Cho et al., BlueConnect, 2019, section 4, with two levels.)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm import shared
from spmd_engine.comm.board import REDUCED, Board
from spmd_engine.comm.header import Header
from spmd_engine.comm.lending import fill, flat
from spmd_engine.comm.meeting import Meeting
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.reducing import accumulated_in, reducer
from spmd_engine.comm.spans import span, spans
from spmd_engine.comm.transports.exchange import Exchange, Parts
from spmd_engine.comm.transports.messages import Messages, Part, Ranks


def even_nodes(hosts: Sequence[Hashable]) -> list[list[int]] | None:
    """Ranks by nodes, if several nodes have several ranks each, and all as many; ``hosts``: each rank's node."""
    nodes: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    sizes = set(map(len, nodes.values()))
    return list(nodes.values()) if len(nodes) > 1 and len(sizes) == 1 and 1 not in sizes else None


class Lanes:
    """A group's ranks by nodes, as one of them sees it: ``nodes`` as of ``even_nodes``, ``board`` of its own node.

    All calls of the group take the pages of the board in turn, also those that need none.
    """

    def __init__(self, comm: Ranks, nodes: Sequence[Sequence[int]], board: Board) -> None:
        self.nodes, self.board, self.rank, self.size = nodes, board, comm.rank, comm.size
        own = next(node for node in nodes if comm.rank in node)
        board.ranks = own
        self.local = Part(comm, own)  #: the ranks of this node
        self.lane = Part(comm, [node[self.local.rank] for node in nodes])  #: those of other nodes in this rank's place

    def in_turn(self, number: int, steps: Steps) -> Steps:
        """The ``steps`` of call ``number``, once there is a page for it."""
        if not self.board.has_page(number, 0):
            yield self.board.until_page(number, 0)
        return (yield from steps)


class Hierarchical:
    """See ``Exchange``, whose methods these are, of ranks that have met on their node: ``meeting``.

    ``lane`` moves the data between nodes.
    """

    def __init__(self, lanes: Lanes, meeting: Meeting, lane: Exchange) -> None:
        self.rank, self.size = lanes.rank, lanes.size
        self._lanes, self._meeting, self._lane, self._local = lanes, meeting, lane, Messages(lanes.local)

    def all_reduce(self, number: int, x: Array, out: Array, reduction: str) -> Steps:
        """``out`` = the reduction of ``x`` over ranks, both shown as ``shared.prepare`` has them.

        A rank writes to no part of its memory but its lane's until all have read there what they need.
        """
        parts = [span(x.size, self.size, r) for r in range(self.size)]
        yield from self._scatter(number, x, parts, out[parts[self.rank]], reduction, last=False)
        yield from self.all_gather(number, out, parts)

    def reduce_scatter(self, number: int, x: Array, parts: Parts, out: Array, reduction: str) -> Steps:
        """``out``, flat, = this rank's part, of flat ``parts``, of the reduction of ``x`` over ranks."""
        yield from self._scatter(number, x, parts, out, reduction, last=True)
        if self._meeting.exposed:
            yield from self._meeting.end()

    def all_gather(self, number: int, out: Array, parts: Parts) -> Steps:
        """Fill ``out``, of which this rank's part is there: the lane's parts, then the others of the node from theirs.

        Where not all of the node's ranks could show their ``out``, they send each other all.
        """
        lanes, board = self._lanes, self._lanes.board
        yield from self._lane.all_gather(number, out, [parts[r] for r in lanes.lane.members])
        header = Header("all_gather", dtype=self._meeting.headers[board.rank].dtype, shape=out.shape)
        results = board.results(self._meeting.number, header)
        if any(each is None for each in results):
            for node in lanes.nodes:
                yield from self._local.all_gather(number, out, [parts[r] for r in node])
            return
        board.say(self._meeting.number, REDUCED)
        yield board.until(self._meeting.number, REDUCED)
        for neighbour, theirs in enumerate(results):
            if neighbour != board.rank:
                for node in lanes.nodes:
                    part = parts[node[neighbour]]
                    fill(out[part], flat(theirs)[part])
        self._meeting.exposed = True
        yield from self._meeting.end()

    def _scatter(self, number: int, x: Array, parts: Parts, out: Array, reduction: str, last: bool) -> Steps:
        """``out`` = the reduction over ranks of everyone's ``x[parts[rank]]``.

        16-bit floats pass between nodes in the float32 that they are accumulated in, so that they are rounded once.
        """
        lanes, backend, between = self._lanes, backend_of(x), "sum" if reduction == "mean" else reduction
        blocks = [flat(block) for block in self._meeting.blocks] if self._meeting.readable else None
        wide = accumulated_in(out.dtype)
        members = lanes.lane.members
        places = spans([parts[r].stop - parts[r].start for r in members])
        sums = backend.empty((places[-1].stop,), wide)  # of this node, for each of the lane
        for node, r, place in zip(lanes.nodes, members, places, strict=True):
            if blocks is not None:
                each = [block[parts[r]] for block in blocks]
                shared.reduce_in_pieces(sums[place], each, reducer(between, out.dtype, np))
            else:
                local = spans([parts[each].stop - parts[each].start for each in node])
                own = backend.empty((local[-1].stop,), wide)
                for each, where in zip(node, local, strict=True):
                    own[where] = x[parts[each]]
                yield from self._local.reduce_scatter(number, own, local, sums[place], between)
        total = out if out.dtype == wide else backend.empty(out.shape, wide)
        yield from self._lane.reduce_scatter(number, sums, places, total, between, last=last)
        if reduction == "mean":
            total /= wide.type(lanes.size)
        if total is not out:
            out[...] = total
