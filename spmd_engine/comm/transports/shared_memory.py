"""By memory that ranks of one node share, or read in each other's processes: nothing is copied before it is needed.

Ranks meet on their table and show their arrays there (``meet``). What is reduced is so in rank order, where it lies, in
pieces that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.agreement.signature import Signature, Signatures
from spmd_engine.comm.dispatch import Tuning
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.reducing import Reducer, reducer
from spmd_engine.comm.shared_memory.cross_memory import Block, fill, flat, here
from spmd_engine.comm.shared_memory.slot_table import CALLED, LEFT, NOWHERE, REDUCED, SlotTable
from spmd_engine.comm.spans import span
from spmd_engine.comm.transports.transport import GatherAndReduce, Parts

CACHE = 1 << 19  # bytes of all ranks' blocks together that are worked on at a time: they stay in the second-level cache
LINE = 64  # bytes that ranks do not share, as they would have to pass them to and fro


class SharedMemory(GatherAndReduce):
    """See ``GatherAndReduce``, of the ranks of a node that have met in call ``number``: what they call, and their data.

    ``blocks`` are everyone's arrays, None where this rank cannot read them; what is not shown is not read.
    """

    def __init__(
        self, table: SlotTable, number: int, signatures: Signatures, blocks: list[Block | None], exposed: bool
    ) -> None:
        self.rank, self.size, self.table, self.number = table.rank, table.size, table, number
        self.signatures, self.blocks = signatures, blocks
        self._exposed = exposed  # whether others may read, or write to, memory that is not the table's

    @property
    def shown(self) -> bool:
        """Whether all data can be read, by all ranks."""
        return self.table.shown(self.signatures, self.blocks)

    @property
    def results_shown(self) -> bool:
        """Whether all have shown where their results are to come."""
        return NOWHERE not in self.table.result_arenas(self.number)

    def all_gather(self, x: np.ndarray, parts: Parts, *, last: bool = True) -> Steps:
        """See ``GatherAndReduce``. All have shown ``x`` as their results, from where the others read."""
        results = self.table.results(self.number, x.shape, x.dtype)
        yield from self.table.come_to(self.number, REDUCED)
        for r, part in enumerate(parts):
            if r != self.rank and part.stop > part.start:
                fill(x[part], results[r][part])

    def reduce_scatter(
        self, x: np.ndarray, parts: Parts, out: np.ndarray, reduction: str, *, last: bool = True
    ) -> Steps:
        mine = parts[self.rank]
        reduce_in_pieces([out], [flat(block)[mine] for block in self.blocks], reducer(reduction, x.dtype, np))
        yield from ()

    def all_reduce(self, x: np.ndarray, out: np.ndarray, reduction: str) -> Steps:
        """Each rank reduces a part of ``x``. It writes that to all results, if all are where ranks share memory;
        else the others read it."""
        results = self.table.results(self.number, out.shape, out.dtype)
        parts = [_between_lines(out, self.size, r) for r in range(self.size)]
        mine, shared = parts[self.rank], min(self.table.result_arenas(self.number)) >= 0
        written = [out, *(each for r, each in enumerate(results) if r != self.rank)] if shared else [out]
        blocks = [flat(block)[mine] for block in self.blocks]
        reduce_in_pieces([each[mine] for each in written], blocks, reducer(reduction, x.dtype, np))
        yield from self.table.come_to(self.number, REDUCED)
        if shared:
            self._exposed = False  # all have read and written what they had to
            return
        for r, part in enumerate(parts):
            if r != self.rank:
                fill(out[part], results[r][part])

    def end(self) -> Steps:
        """Let go of the others' memory, and go on when nobody needs this rank's any more."""
        self.table.say(self.number, LEFT)
        if self._exposed:
            yield from self.table.come_to(self.number, LEFT)


def meet(
    table: SlotTable,
    number: int,
    own: Signature,
    data: np.ndarray | None,
    result: np.ndarray | None,
    expected: Signatures,
) -> Steps:
    """Meet on a node's table, where contiguous ``data`` are shown, and ``result``, where it is to come to.

    Who does not show an array makes it one that nobody reads. ``expected``: what all called last time. Returns the
    SharedMemory of this call.
    """
    yield from table.wait_until_free(number, own.inline)
    at = table.address(data) if data is not None and not own.inline and data.size else None
    table.write(number, own, data, at, table.address(result) if result is not None else None)
    yield from table.come_to(number, CALLED)
    signatures, blocks = table.read(number, expected, data if at is not None else None)
    return SharedMemory(table, number, signatures, blocks, at is not None or result is not None)


def readable(table: SlotTable, x: np.ndarray, tuning: Tuning, sliced: bool) -> np.ndarray | None:
    """Contiguous ``x``, or a copy of it, where the others can read it; None if there is no such place.

    ``sliced``: see ``SlotTable.address``.
    """
    if not x.size or table.address(x, sliced) is not None:
        return x
    copy = table.neighbours.own.empty(x.shape, x.dtype) if sliced or x.nbytes <= tuning.copied else None
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


def keeps_apart(out: np.ndarray, x: np.ndarray, part: tuple[slice, ...]) -> bool:
    """Whether ``out`` may be written to while others read all of ``x`` but this ``part``, whose place it may have."""
    overlaps = isinstance(x, np.ndarray) and isinstance(out, np.ndarray) and np.may_share_memory(out, x)
    return not overlaps or (x[part].flags.c_contiguous and address_of(x[part]) == address_of(out))


def _between_lines(x: np.ndarray, parts: int, index: int) -> slice:
    """This part of flat ``x``, cut between cache lines."""
    unit = max(1, LINE // x.itemsize)
    part = span(-(-x.size // unit), parts, index)
    return slice(min(part.start * unit, x.size), min(part.stop * unit, x.size))


def reduce_in_pieces(outs: Sequence[np.ndarray], blocks: Sequence[Block], reduce: Reducer) -> None:
    """Each of ``outs``, all flat, = the reduction of ``blocks``. The first may be one of them, else they overlap none.

    As many bytes of each block are worked on at a time as fit into the cache together.
    """
    first, *others = outs
    step = max(1, CACHE // len(blocks) // first.itemsize)
    for start in range(0, first.size, step):
        piece = slice(start, start + step)
        reduce(first[piece], [here(block[piece]) for block in blocks])
        for each in others:
            each[piece] = first[piece]
