"""Reductions over arrays that all ranks of a group can read where they are, in pieces that stay in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.board import REDUCED, Board
from spmd_engine.comm.lending import Block, Lent, fill, flat, here
from spmd_engine.comm.meeting import Meeting
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.spans import span

CACHE = 1 << 19  # bytes of all ranks' blocks together that are worked on at a time: they stay in the second-level cache
WHOLE = 1 << 19  # bytes of all ranks' blocks up to which every rank reduces all of them, rather than meet twice
Reducer = Callable[[np.ndarray, Sequence[np.ndarray]], None]  # of reducing.reducer
LINE = 64  # bytes that ranks do not share, as they would have to pass them to and fro


def prepare(board: Board, x: np.ndarray, out: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
    """What to show for an all_reduce of ``x``: data, and where their result is to come to; None if there is no room.

    The others can read both, and both are one or lie apart.
    """
    lend = board.neighbours.lender is not None
    result = out if out is not None and board.place_of(out, lend) else board.neighbours.own.empty(x.shape, x.dtype)
    if result is None and lend:
        result = np.empty_like(x)
    if result is None:
        return None
    if not board.place_of(x, lend):
        np.copyto(result, x)
        return result, result
    same = address_of(x) == address_of(result)
    return x.copy() if not same and np.may_share_memory(x, result) else x, result


def all_reduce(meeting: Meeting, result: np.ndarray, reduce: Reducer) -> Steps:
    """Reduce everyone's block into everyone's result, of which this rank's is ``result``.

    Each rank reduces a part, and writes it to where it can. The rest then fetch it from there.
    """
    board = meeting.board
    blocks = [flat(block) for block in meeting.blocks]
    results = [flat(each) for each in board.results(meeting.number, meeting.headers[board.rank])]
    results[board.rank] = own = result.reshape(-1)
    others = [r for r in range(board.size) if r != board.rank]
    reachable = [results[r] for r in others if isinstance(results[r], np.ndarray)]
    mine = _part(own, board.size, board.rank)
    for piece in _pieces(own[mine], board.size):
        piece = slice(mine.start + piece.start, mine.start + piece.stop)
        reduce(own[piece], [here(block[piece]) for block in blocks])
        for each in reachable:
            each[piece] = own[piece]
    board.say(meeting.number, REDUCED)
    yield board.until(meeting.number, REDUCED)
    if not board.place_of(result):
        for r in others:
            part = _part(own, board.size, r)
            fill(own[part], results[r][part])
    meeting.exposed = len(reachable) < len(others) or not board.place_of(result)  # somebody fetches
    if meeting.exposed:
        yield from meeting.end()


def reduce_in_pieces(out: np.ndarray, blocks: Sequence[Block], reduce: Reducer) -> None:
    """``out`` = the reduction of ``blocks``. It may be one of them, else it overlaps none."""
    if out.nbytes <= CACHE // len(blocks):
        return reduce(out, [here(block) for block in blocks])
    if out.flags.c_contiguous and all(isinstance(block, Lent) or block.flags.c_contiguous for block in blocks):
        out, blocks = out.reshape(-1), [flat(block) for block in blocks]
    for piece in _pieces(out, len(blocks)):
        reduce(out[piece], [here(block[piece]) for block in blocks])


def keeps_apart(out: np.ndarray, x: np.ndarray, part: tuple[slice, ...]) -> bool:
    """Whether ``out`` may be written to while others read all of ``x`` but this ``part``."""
    whole = isinstance(x, np.ndarray) and np.may_share_memory(out, x)
    return not whole or (x[part].flags.c_contiguous and address_of(x[part]) == address_of(out))


def _part(x: np.ndarray, parts: int, index: int) -> slice:
    """This part of flat ``x``, cut between cache lines."""
    unit = max(1, LINE // x.itemsize)
    part = span(-(-x.size // unit), parts, index)
    return slice(min(part.start * unit, x.size), min(part.stop * unit, x.size))


def _pieces(x: np.ndarray, blocks: int) -> Iterator[slice]:
    """Pieces of ``x`` along its first axis; as many bytes of each block fit into the cache together."""
    row = x.nbytes // len(x) if len(x) else 1
    step = max(1, CACHE // blocks // row)
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))
