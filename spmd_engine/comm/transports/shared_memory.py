"""Transport by memory that ranks of one node share, or read in each other's processes.

Reductions read blocks in place, in rank order, in pieces that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import EllipsisType

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.blocks import Reducer, reducer, span
from spmd_engine.comm.connections import Tuning
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.shared_memory.cross_memory import Block, fill, flat, to_array
from spmd_engine.comm.shared_memory.slot_table import REDUCED, RELEASED, SlotTable
from spmd_engine.comm.transports.transport import AgreedCall, Facts, Parts, Transport

CACHE = 1 << 19  # bytes of all ranks' blocks together that one step reduces: they fit into the second-level cache
LINE = 64  # bytes of a cache line: two ranks should not write to the same one


class SharedMemory(Transport):
    """See ``Transport``, for the ranks of a node that have exchanged entries in their slot table.

    ``blocks``: arrays of all ranks, None where this rank cannot read them.
    """

    name = "shared memory"

    @staticmethod
    def suits(call: Signature, facts: Facts) -> bool:
        return facts.one_node and facts.readable

    def __init__(self, call: AgreedCall) -> None:
        super().__init__(call)
        assert call.connections.node_table is not None and call.entries is not None
        self.table, self.number = call.connections.node_table, call.number
        self.blocks, self._exposed = call.entries.blocks, call.entries.exposed

    def all_gather(self, x: np.ndarray, parts: Parts) -> Steps:
        """See ``Transport``. ``x`` is the readable result buffer of every rank."""
        yield from self.table.reach(self.number, REDUCED)
        results = self.table.results(self.number, x.shape, x.dtype)
        for r, part in enumerate(parts):
            if r != self.rank and part.stop > part.start:
                fill(x[part], results[r][part])

    def reduce_scatter(self, x: np.ndarray, parts: Parts, out: np.ndarray, reduction: str) -> Steps:
        mine = parts[self.rank]
        reduce_in_pieces([out], [flat(block)[mine] for block in self.blocks], reducer(reduction, x.dtype, np))
        yield from ()

    def all_reduce(self, x: np.ndarray, out: np.ndarray, reduction: str) -> Steps:
        """Each rank reduces a part of ``x`` and writes it to all results if they are in shared memory; otherwise the
        other ranks read the part. ``out`` may be elsewhere than this rank's result, and gets a copy of the parts."""
        results = self.table.results(self.number, out.shape, out.dtype)
        parts = _split_at_cache_lines(out.size, out.itemsize, self.size)
        mine, shared = parts[self.rank], min(self.table.result_arenas(self.number)) >= 0
        own = results[self.rank]  # ``out``, or what others write and read instead
        copies = isinstance(own, np.ndarray) and address_of(own) != address_of(out)
        written = [out, *(result for r, result in enumerate(results) if r != self.rank)] if shared else [out]
        written += [own] if copies and not shared else []
        blocks = [(x if r == self.rank else flat(block))[mine] for r, block in enumerate(self.blocks)]
        reduce_in_pieces([result[mine] for result in written], blocks, reducer(reduction, x.dtype, np))
        yield from self.table.reach(self.number, REDUCED)
        if shared:
            self._exposed = False  # all ranks have finished reading and writing
            results = [own] * self.size
        for r, part in enumerate(parts):
            if r != self.rank and (copies or not shared):
                fill(out[part], results[r][part])

    def end(self) -> Steps:
        """Release the others' memory, and continue when no other rank needs this rank's memory."""
        self.table.set_phase(self.number, RELEASED)
        if self._exposed:
            yield from self.table.reach(self.number, RELEASED)


def readable(table: SlotTable, x: np.ndarray, tuning: Tuning, sliced: bool) -> np.ndarray | None:
    """Contiguous ``x`` or a copy, in memory that the other ranks can read; None if there is no room.

    ``sliced``: see ``SlotTable.address``.
    """
    if not x.size or table.address(x, sliced) is not None:
        return x
    copy = table.neighbours.own.empty(x.shape, x.dtype) if sliced or x.nbytes <= tuning.copied else None
    if copy is not None:
        copy[...] = x
    return copy


def readable_result(table: SlotTable, like: np.ndarray, out: np.ndarray | None) -> np.ndarray | None:
    """``out`` or a result buffer like ``like``, readable by the other ranks; None if there is no room."""
    if out is not None and table.address(out):
        return out
    result = table.neighbours.own.empty(like.shape, like.dtype)
    return np.empty_like(like) if result is None and table.neighbours.cross_memory else result


def readable_with_result(
    table: SlotTable, x: np.ndarray, out: np.ndarray | None, copies: bool
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Data and result buffer of an all_reduce of ``x``, both readable by the other ranks; None if there is no room.

    ``out``, if given, is ``x`` itself or does not overlap it. ``copies``: if ``x`` is not in shared memory, its parts
    for the others are copied there, where also the result can be.
    """
    neighbours = table.neighbours
    if copies and neighbours.offset(x) is None and (copy := neighbours.own.empty(x.shape, x.dtype)) is not None:
        for r, part in enumerate(_split_at_cache_lines(x.size, x.itemsize, table.size)):
            if r != table.rank:
                copy.reshape(-1)[part] = x.reshape(-1)[part]
        return copy, out if out is not None and neighbours.offset(out) is not None else copy
    result = readable_result(table, x, out)
    if result is None:
        return None, None
    if not table.address(x):
        np.copyto(result, x)
        return result, result
    return x, result


def keeps_apart(out: Array, x: Array, part: tuple[slice | EllipsisType, ...]) -> bool:
    """Whether a rank may write ``out`` while others read ``x`` except ``part``. ``out`` may be this part."""
    in_place = isinstance(x, np.ndarray) and isinstance(out, np.ndarray) and np.may_share_memory(out, x)
    return not in_place or (x[part].flags.c_contiguous and address_of(x[part]) == address_of(out))


@lru_cache(maxsize=512)
def _split_at_cache_lines(length: int, itemsize: int, parts: int) -> Sequence[slice]:
    """The parts of a flat array, split at multiples of a cache line."""
    unit = max(1, LINE // itemsize)
    ends = [span(-(-length // unit), parts, r) for r in range(parts)]
    return [slice(min(part.start * unit, length), min(part.stop * unit, length)) for part in ends]


def reduce_in_pieces(outs: Sequence[np.ndarray], blocks: Sequence[Block], reduce: Reducer) -> None:
    """Write the reduction of ``blocks`` to each of ``outs``, all flat. The first may be a block; no others overlap.

    It proceeds in pieces of the blocks that fit into the cache together.
    """
    first, *others = outs
    step = max(1, CACHE // len(blocks) // first.itemsize)
    for start in range(0, first.size, step):
        piece = slice(start, start + step)
        reduce(first[piece], [to_array(block[piece]) for block in blocks])
        for out in others:
            out[piece] = first[piece]
