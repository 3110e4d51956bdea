"""By memory that ranks of one node share, or read in each other's processes: nothing is copied before it is needed.

Ranks have met and shown their arrays (``rendezvous``). What is reduced is so in rank order, where it lies, in pieces
that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.reducing import Reducer, reducer
from spmd_engine.comm.rendezvous import Rendezvous
from spmd_engine.comm.slot_table import REDUCED, SlotTable
from spmd_engine.comm.spans import span
from spmd_engine.comm.transports.transport import Parts, Transport
from spmd_engine.comm.tuning import Tuning
from spmd_engine.node.cross_memory import Block, RemoteArray, fill, flat, here

CACHE = 1 << 19  # bytes of all ranks' blocks together that are worked on at a time: they stay in the second-level cache
LINE = 64  # bytes that ranks do not share, as they would have to pass them to and fro


class SharedMemory(Transport):
    """See ``Transport``, of the ranks of a node that have met. What the others do not show here is not read."""

    def __init__(self, met: Rendezvous, tuning: Tuning) -> None:
        self.rank, self.size, self.tuning = met.table.rank, met.table.size, tuning
        self._met, self._table = met, met.table
        self._blocks = [block if block is None else flat(block) for block in met.blocks]

    def all_gather(self, number: int, x: np.ndarray, parts: Parts, *, last: bool = True) -> Steps:
        """See ``Transport``. Where ranks have shown ``x``, it is from there that the others read."""
        results = self._table.results(self._met.number, x.shape, x.dtype)
        if results[self.rank] is not None:
            self._table.say(self._met.number, REDUCED)
            yield self._table.until(self._met.number, REDUCED)
        for r, part in enumerate(parts):
            if r != self.rank and part.stop > part.start:
                fill(x[part], self._blocks[r] if results[self.rank] is None else results[r][part])

    def all_to_all(
        self, number: int, x: np.ndarray, parts: Parts, out: np.ndarray, out_parts: Parts, *, last: bool = True
    ) -> Steps:
        for r, signature in enumerate(self._met.signatures.by_rank):
            if r == self.rank or out_parts[r].stop == out_parts[r].start:
                continue
            if signature.inline:  # not packed
                cut = (slice(None),) * signature.axis + (signature.part_for(self.rank, self.size),)
                fill(out[out_parts[r]], self._met.blocks[r][cut].reshape(-1))
            else:
                fill(out[out_parts[r]], self._blocks[r][signature.packed_part_for(self.rank, self.size)])
        yield from ()

    def broadcast(self, number: int, x: np.ndarray, root: int) -> Steps:
        if self.rank != root and x.size:
            fill(x, self._blocks[root])
        yield from ()

    def reduce_scatter(
        self, number: int, x: np.ndarray, parts: Parts, out: np.ndarray, reduction: str, *, last: bool = True
    ) -> Steps:
        mine = parts[self.rank]
        reduce_in_pieces(out, [block[mine] for block in self._blocks], reducer(reduction, x.dtype, np))
        yield from ()

    def all_reduce(self, number: int, x: np.ndarray, out: np.ndarray, reduction: str) -> Steps:
        """Each rank reduces a part of ``x``. It writes that to all results, if all are where ranks share memory;
        else the others read it."""
        results = self._table.results(self._met.number, out.shape, out.dtype)
        results[self.rank] = out
        parts = [_between_lines(out, self.size, r) for r in range(self.size)]
        mine, reduce = parts[self.rank], reducer(reduction, x.dtype, np)
        shared = self._table.all_results_shared(self._met.number)
        others = [each for r, each in enumerate(results) if r != self.rank] if shared else []
        for piece in _pieces(out[mine], self.size):
            piece = slice(mine.start + piece.start, mine.start + piece.stop)
            reduce(out[piece], [here(block[piece]) for block in self._blocks])
            for each in others:
                each[piece] = out[piece]
        self._table.say(self._met.number, REDUCED)
        yield self._table.until(self._met.number, REDUCED)
        if shared:
            self._met.exposed = False  # all have read and written what they had to
            return
        for r, part in enumerate(parts):
            if r != self.rank:
                fill(out[part], results[r][part])

    def end(self) -> Steps:
        yield from self._met.end()


def readable(table: SlotTable, x: np.ndarray, tuning: Tuning) -> np.ndarray | None:
    """Flat ``x``, or a copy of it, where the others can read it; None if there is no such place."""
    if not x.size or table.address(x) is not None:
        return x
    copy = table.neighbours.own.empty(x.shape, x.dtype) if x.nbytes <= tuning.copied else None
    if copy is not None:
        copy[...] = x
    return copy


def readable_with_result(
    table: SlotTable, x: np.ndarray, out: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """What to show for an all_reduce of ``x``: data, and where their result is to come to; None if there is no room.

    The others can read both. ``out``, if there is one, is ``x`` itself, or lies apart from it.
    """
    if out is not None and table.address(out):
        result = out
    else:
        result = table.neighbours.own.empty(x.shape, x.dtype)
        if result is None and table.neighbours.cross_memory:
            result = np.empty_like(x)
    if result is None:
        return None, None
    if not table.address(x):
        np.copyto(result, x)
        return result, result
    return x, result


def reduce_in_pieces(out: np.ndarray, blocks: Sequence[Block], reduce: Reducer) -> None:
    """``out`` = the reduction of ``blocks``. It may be one of them, else it overlaps none."""
    if out.nbytes <= CACHE // len(blocks):
        return reduce(out, [here(block) for block in blocks])
    if out.flags.c_contiguous and all(isinstance(block, RemoteArray) or block.flags.c_contiguous for block in blocks):
        out, blocks = out.reshape(-1), [flat(block) for block in blocks]
    for piece in _pieces(out, len(blocks)):
        reduce(out[piece], [here(block[piece]) for block in blocks])


def keeps_apart(out: np.ndarray, x: np.ndarray, part: tuple[slice, ...]) -> bool:
    """Whether ``out`` may be written to while others read all of ``x`` but this ``part``, whose place it may have."""
    overlaps = isinstance(x, np.ndarray) and isinstance(out, np.ndarray) and np.may_share_memory(out, x)
    return not overlaps or (x[part].flags.c_contiguous and address_of(x[part]) == address_of(out))


def _between_lines(x: np.ndarray, parts: int, index: int) -> slice:
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
