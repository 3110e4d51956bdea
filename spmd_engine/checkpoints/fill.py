"""Loading into arrays that are there: each block is read and hashed by one rank, which gives others what they want.

Who reads a block wants some of it, and reads it straight to where it belongs if all of it belongs there in one run;
what others want of it they get by a planned transfer. That is done for some arrays after the other, so that beside
its own a rank holds little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.checkpoints.dtypes import DTYPES
from spmd_engine.checkpoints.manifest import StoredArray, StoredBlock
from spmd_engine.comm.agreement import on_all_ranks
from spmd_engine.comm.group import Group
from spmd_engine.errors import CheckpointError
from spmd_engine.sharding.placement import ArrayPlacement, Placement, Rectangles
from spmd_engine.sharding.rectangles import Rectangle, meetings
from spmd_engine.sharding.routes import ranks_of_blocks
from spmd_engine.sharding.transfer import plan_transfer

AT_ONCE = 64 << 20  #: bytes a rank, about, that are read before others get theirs
READERS = 2  #: threads that read and hash for a rank

#: Reads and checks one block, into an array if one is given: (name, array, block, out) -> its elements.
Read = Callable[[str, StoredArray, StoredBlock, np.ndarray | None], np.ndarray]


@dataclass(frozen=True)
class Wanted:
    """An array to be filled."""

    name: str
    stored: StoredArray
    placed: ArrayPlacement
    here: Array | None  #: this rank's block; None if it has none

    @property
    def dtype(self) -> np.dtype:
        """The one that is stored."""
        return DTYPES[self.stored.dtype]

    @cached_property
    def on_host(self) -> np.ndarray:
        """As ``here``, of the dtype that is stored: itself, if it can be read into."""
        x = self.here
        readable = isinstance(x, np.ndarray) and x.dtype == self.dtype and x.flags.c_contiguous
        return x if readable else np.empty(x.shape, self.dtype)


def fill(group: Group, arrays: Sequence[Wanted], read: Read, nodes: Sequence[str]) -> None:
    """Fill this rank's parts of ``arrays``, the same on all ranks. Collective.

    ``nodes``: of each rank, what tells its node from others. Raises CheckpointError on every rank if one could not
    read, or found damage in, what it was to read.
    """
    loads = [0] * group.size  # bytes that each rank reads
    with ThreadPoolExecutor(READERS, "reading") as readers:
        for some in _batches(arrays, AT_ONCE * group.size):
            dealt = {each.name: _dealt(each, loads) for each in some}
            mine = [(each, block) for each in some for block in dealt[each.name][group.rank]]
            places = [_place(each, block, group.rank) for each, block in mine]
            reading = [
                readers.submit(read, each.name, each.stored, block, place)
                for (each, block), place in zip(mine, places, strict=True)
            ]
            on_all_ranks(group, lambda reading=reading: [each.result() for each in reading], CheckpointError)
            found: dict[str, list[np.ndarray]] = {each.name: [] for each in some}
            for (each, _), place in zip(mine, places, strict=True):
                found[each.name].append(place)
            source = Placement({each.name: _as_read(each, dealt[each.name]) for each in some})
            target = Placement({each.name: replace(each.placed, dtype=each.dtype) for each in some})
            out = {each.name: [] if each.here is None else [each.on_host] for each in some}
            plan_transfer(source, target, nodes=nodes).execute(group, found, out=out, label="load")
            for each in some:
                if each.here is not None and each.on_host is not each.here:
                    each.here[...] = backend_of(each.here).asarray(each.on_host)


def _as_read(array: Wanted, dealt: Sequence[Sequence[StoredBlock]]) -> ArrayPlacement:
    """Where the blocks of an array are when they have been read."""
    held = tuple(tuple(block.rectangle for block in blocks) for blocks in dealt)
    return ArrayPlacement(array.stored.shape, array.dtype, held, held)


def _batches(arrays: Sequence[Wanted], most: int) -> Iterator[list[Wanted]]:
    """Neighbours that together have about ``most`` bytes."""
    batch: list[Wanted] = []
    size = 0
    for each in arrays:
        batch.append(each)
        size += each.stored.nbytes
        if size >= most:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _dealt(array: Wanted, loads: list[int]) -> list[list[StoredBlock]]:
    """Which blocks each rank reads: of those who want some of one, it is who has least to read; ``loads`` grow."""
    dealt: list[list[StoredBlock]] = [[] for _ in loads]
    blocks = array.stored.blocks
    ranks = _wanting(tuple(each.rectangle for each in blocks), array.placed.held)
    for block, wanting in zip(blocks, ranks, strict=True):
        if wanting:
            reader = min(wanting, key=loads.__getitem__)
            loads[reader] += block.rectangle.size * array.dtype.itemsize
            dealt[reader].append(block)
    return dealt


@lru_cache(maxsize=256)
def _wanting(blocks: tuple[Rectangle, ...], held: tuple[Rectangles, ...]) -> list[list[int]]:
    """Of each block, the ranks that hold some of it; of layers of a kind, and of all state of a parameter, the same."""
    ranks = ranks_of_blocks(held)
    if not ranks or len(blocks) < 2:  # a single one is all of the array
        return [sorted({rank for some in ranks.values() for rank in some})] * len(blocks)
    shared = meetings(blocks, ranks)[2].tolist()
    return [
        sorted({rank for n, some in zip(sizes, ranks.values(), strict=True) if n for rank in some}) for sizes in shared
    ]


def _place(array: Wanted, block: StoredBlock, rank: int) -> np.ndarray:
    """Where this rank reads a block to: where it belongs, or new memory."""
    (held,) = array.placed.held[rank]
    if block.rectangle in held:
        place = array.on_host[(..., *block.rectangle.within(held).index)]
        if place.flags.c_contiguous:
            return place
    return np.empty(block.rectangle.shape, array.dtype)
