"""Reductions over arrays that all ranks of a group can read where they are, in pieces that stay in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from spmd_engine.comm import algorithms
from spmd_engine.comm.arena import address_of
from spmd_engine.comm.board import REDUCED, Board
from spmd_engine.comm.meeting import Meeting
from spmd_engine.comm.pending import Steps

CACHE = 1 << 19  # bytes of all ranks' blocks together that are worked on at a time: they stay in the second-level cache
Reducer = Callable[[np.ndarray, Sequence[np.ndarray]], None]  # of algorithms.reducer
LINE = 64  # bytes that ranks do not share, as they would have to pass them to and fro


def workspace(board: Board, x: np.ndarray, out: np.ndarray | None) -> np.ndarray | None:
    """Memory of the arena, filled with ``x``, to be reduced in place: ``out`` if it lies there. None: no room."""
    work = out if out is not None and board.place_of(out) else board.neighbours.own.empty(x.shape, x.dtype)
    if work is not None and work is not x:
        np.copyto(work, x)
    return work


def reduce_in_place(meeting: Meeting, reduce: Reducer) -> Steps:
    """Everyone's block becomes the reduction of all: each rank reduces a part, and writes it into all blocks."""
    blocks = [block.reshape(-1) for block in meeting.blocks]
    board = meeting.board
    mine = _part(blocks[0], board.size, board.rank)
    own, others = blocks[board.rank], [block for r, block in enumerate(blocks) if r != board.rank]
    for piece in _pieces(own[mine], board.size):
        piece = slice(mine.start + piece.start, mine.start + piece.stop)
        reduce(own[piece], [block[piece] for block in blocks])
        for block in others:
            block[piece] = own[piece]
    board.say(meeting.number, REDUCED)
    yield partial(board.reached, meeting.number, REDUCED)


def reduce_in_pieces(out: np.ndarray, blocks: Sequence[np.ndarray], reduce: Reducer) -> None:
    """``out`` = the reduction of ``blocks``. It may be one of them, else it overlaps none."""
    if out.nbytes <= CACHE // len(blocks):
        return reduce(out, blocks)
    if out.flags.c_contiguous and all(block.flags.c_contiguous for block in blocks):
        out, blocks = out.reshape(-1), [block.reshape(-1) for block in blocks]
    for piece in _pieces(out, len(blocks)):
        reduce(out[piece], [block[piece] for block in blocks])


def keeps_apart(out: np.ndarray, x: np.ndarray, part: tuple[slice, ...]) -> bool:
    """Whether ``out`` may be written to while others read all of ``x`` but this ``part``."""
    whole = isinstance(x, np.ndarray) and np.may_share_memory(out, x)
    return not whole or (x[part].flags.c_contiguous and address_of(x[part]) == address_of(out))


def _part(x: np.ndarray, parts: int, index: int) -> slice:
    """This part of flat ``x``, cut between cache lines."""
    unit = max(1, LINE // x.itemsize)
    part = algorithms.span(-(-x.size // unit), parts, index)
    return slice(min(part.start * unit, x.size), min(part.stop * unit, x.size))


def _pieces(x: np.ndarray, blocks: int) -> Iterator[slice]:
    """Pieces of ``x`` along its first axis; as many bytes of each block fit into the cache together."""
    row = x.nbytes // len(x) if len(x) else 1
    step = max(1, CACHE // blocks // row)
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))
