"""Large collectives of ranks on several nodes, on two floors: within a node by memory, between nodes in lanes.

Lane j is made of the j-th ranks of all nodes. Whatever has to leave a node does so in one lane alone, already reduced
over the node's ranks: so an all_reduce of S bytes on M nodes takes 2 S (M-1)/M out of each, where messages between
all ranks take as many times that as a node has ranks. All ranks together send what they would on one floor.

First the ranks of a node are combined, in their order in the group, then the nodes, in the order of their first ranks.
(Hierarchical collectives: Cho et al., BlueConnect, 2019, section 4, with two floors.)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm import algorithms, shared
from spmd_engine.comm.algorithms import Part, Ranks
from spmd_engine.comm.board import REDUCED, Board
from spmd_engine.comm.header import Call
from spmd_engine.comm.lending import Block, fill, flat
from spmd_engine.comm.meeting import Meeting, on_board
from spmd_engine.comm.pending import Steps

LARGE = 1 << 16  # bytes of a whole array from which its way is two floors

Parts = Sequence[slice | tuple[slice, ...]]  # of an array, by rank


def even_nodes(hosts: Sequence[Hashable]) -> list[list[int]] | None:
    """Ranks by nodes, if several nodes have several ranks each, and all as many; ``hosts``: each rank's node."""
    nodes: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    sizes = set(map(len, nodes.values()))
    return list(nodes.values()) if len(nodes) > 1 and len(sizes) == 1 and 1 not in sizes else None


class Lanes:
    """The floors of a group, as one of its ranks sees them: ``nodes`` as of ``even_nodes``, ``board`` of its own node.

    All calls of the group take the pages of the board in turn, also those that need none.
    """

    def __init__(self, comm: Ranks, nodes: Sequence[Sequence[int]], board: Board) -> None:
        self.nodes, self.board, self.rank, self.size = nodes, board, comm.rank, comm.size
        own = next(node for node in nodes if comm.rank in node)
        self.local = Part(comm, own)
        board.ranks = own
        self.lane = Part(comm, [node[self.local.rank] for node in nodes])

    def in_turn(self, number: int, steps: Steps) -> Steps:
        """The ``steps`` of call ``number``, once there is a page for it."""
        if not self.board.has_page(number, 0):
            yield self.board.until_page(number, 0)
        return (yield from steps)

    def show(self, call: Call, x: np.ndarray | None, **how) -> Steps:
        """Show ``x`` to the ranks of the node, which call the same; see ``on_board``. Returns the Meeting.

        The group has compared its calls already, so here only the array's shape and dtype are needed. ``sizes`` stay
        out: there is one for each rank of the group, and the board has room for its own ranks' alone.
        """
        return on_board(self.board, call._replace(header=replace(call.header, sizes=())), x, "", False, **how)


def all_reduce(lanes: Lanes, call: Call, x: Array, out: Array | None, tag: int) -> Steps:
    """The reduction of contiguous ``x`` over ranks, in ``out`` where that can be; ``out`` may be ``x``."""
    prepared = shared.prepare(lanes.board, x, out) if isinstance(x, np.ndarray) else None
    x, result = prepared or (x, None)
    meeting = yield from lanes.show(call, x if prepared else None, lend=True, result=result)
    if result is None:
        result = out if out is not None else backend_of(x).empty(x.shape, x.dtype)
    blocks = [flat(block) for block in meeting.blocks] if meeting.readable else None
    parts = [algorithms.span(x.size, lanes.size, r) for r in range(lanes.size)]
    total = result.reshape(-1)
    # A rank writes to no part of its memory but its lane's until all have read there what they need.
    own = total[parts[lanes.rank]]
    yield from _scatter(lanes, blocks, x.reshape(-1), parts, own, call.header.reduction, tag)
    yield from _gather(lanes, meeting, _results(meeting, call), total, parts, tag + 1)
    return result


def reduce_scatter(
    lanes: Lanes, call: Call, x: Array, parts: Parts, out: Array, tag: int, *, lend: bool, copy: bool
) -> Steps:
    """``out`` = this rank's part of the reduction of ``x`` over ranks. ``lend``, ``copy``: see ``on_board``."""
    meeting = yield from lanes.show(call, x if isinstance(x, np.ndarray) else None, lend=lend, copy=copy)
    blocks = meeting.blocks if meeting.readable else None
    yield from _scatter(lanes, blocks, x, parts, out, call.header.reduction, tag)
    if meeting.exposed:
        yield from meeting.end()


def all_gather(lanes: Lanes, call: Call, out: Array, parts: Parts, tag: int) -> Steps:
    """Fill contiguous ``out``, of which ``parts[rank]``, along the first axis, is this rank's and there already."""
    call = call._replace(header=replace(call.header, shape=out.shape, inline=0))
    result = out if isinstance(out, np.ndarray) else None
    meeting = yield from lanes.show(call, None, lend=True, result=result)
    yield from _gather(lanes, meeting, _results(meeting, call), out, parts, tag)


def _results(meeting: Meeting, call: Call) -> list[Block] | None:
    """Where the ranks of the node have their results; None if one of them cannot show it."""
    results = meeting.board.results(meeting.number, call.header)
    return None if any(each is None for each in results) else results


def _scatter(
    lanes: Lanes, blocks: Sequence[Block] | None, x: Array, parts: Parts, out: Array, reduction: str, tag: int
) -> Steps:
    """``out`` = the reduction over ranks of everyone's ``x[parts[rank]]``.

    ``blocks``: everyone's ``x`` on this node, or None: send them. 16-bit floats pass between nodes in the float32 they
    are accumulated in, so that they are rounded once.
    """
    xp, between = backend_of(x).xp, "sum" if reduction == "mean" else reduction
    wide = algorithms.accumulated_in(out.dtype)
    sums = [xp.empty(x[parts[r]].shape, wide) for r in lanes.lane.members]  # of this node, for each of the lane
    for node, r, its in zip(lanes.nodes, lanes.lane.members, sums, strict=True):
        if blocks is not None:
            reduce = algorithms.reducer(between, out.dtype, np)
            shared.reduce_in_pieces(its, [block[parts[r]] for block in blocks], reduce)
        else:
            own = [x[parts[each]] for each in node]
            own = [xp.ascontiguousarray(part if part.dtype == wide else part.astype(wide)) for part in own]
            yield from algorithms.reduce_scatter(lanes.local, own, its, between, tag)
    total = out if out.dtype == wide else xp.empty(out.shape, wide)
    yield from algorithms.reduce_scatter(lanes.lane, sums, total, between, tag)
    if reduction == "mean":
        total /= wide.type(lanes.size)
    if total is not out:
        out[...] = total


def _gather(
    lanes: Lanes, meeting: Meeting, results: Sequence[Block] | None, out: Array, parts: Parts, tag: int
) -> Steps:
    """Fill ``out``, of which ``parts[rank]`` is there: the lane's parts, then from ``results`` the others of the node.

    Without ``results`` the ranks of the node send them.
    """
    blocks, board = [out[part] for part in parts], lanes.board
    yield from algorithms.all_gather(lanes.lane, blocks[lanes.rank], [blocks[r] for r in lanes.lane.members], tag)
    if results is None:
        for node in lanes.nodes:
            own = blocks[node[lanes.local.rank]]
            yield from algorithms.all_gather(lanes.local, own, [blocks[r] for r in node], tag)
        return
    board.say(meeting.number, REDUCED)
    yield board.until(meeting.number, REDUCED)
    for neighbour, theirs in enumerate(results):
        if neighbour != board.rank:
            theirs = flat(theirs) if out.ndim == 1 else theirs
            for node in lanes.nodes:
                fill(blocks[node[neighbour]], theirs[parts[node[neighbour]]])
    meeting.exposed = True
    yield from meeting.end()
