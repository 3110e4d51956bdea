"""Loading into arrays that are there: each rank reads what it wants of each block straight to where it belongs.

Of those on a node who want some of a block, one reads all of it and checks its hash; the others read their part of the
same file, through the cache that a node has for its files. A checkpoint's files are never written to again. So a node
reads what its ranks want from the disk once, hashes it once, and nothing passes between ranks but that all is well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.checkpoints.dtypes import DTYPES
from spmd_engine.checkpoints.headers import Headers
from spmd_engine.checkpoints.manifest import StoredArray, StoredBlock
from spmd_engine.checkpoints.parts import PartReader
from spmd_engine.comm.agreement import on_all_ranks
from spmd_engine.comm.group import Group
from spmd_engine.errors import CheckpointError
from spmd_engine.sharding.placement import ArrayPlacement, Rectangles
from spmd_engine.sharding.rectangles import Rectangle, meetings
from spmd_engine.sharding.routes import ranks_of_blocks

AT_ONCE = 64 << 20  #: bytes, about, that are read beside the arrays, where those cannot be read into
READERS = 2  #: threads that read and hash for a rank
SMALL = 1 << 16  #: bytes: handing less to a thread takes longer than reading it


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

    def on_host(self) -> np.ndarray:
        """As ``here``, of the dtype that is stored: itself, if it can be read into."""
        x = self.here
        readable = isinstance(x, np.ndarray) and x.dtype == self.dtype and x.flags.c_contiguous
        return x if readable else np.empty(x.shape, self.dtype)


def fill(group: Group, arrays: Sequence[Wanted], folder: Path, headers: Headers, nodes: Sequence[Hashable]) -> None:
    """Fill this rank's parts of ``arrays``, the same on all ranks, from the files in a checkpoint's folder. Collective.

    ``nodes``: of each rank, what tells its node from others. Raises CheckpointError on every rank if one could not
    read, or found damage in, what it was to read.
    """

    def fill_here() -> None:
        loads = {rank: 0 for rank, node in enumerate(nodes) if node == nodes[group.rank]}
        with PartReader(folder, headers) as reader, ThreadPoolExecutor(READERS, "reading") as readers:
            filling = _Filling(reader, readers)
            try:
                for each in arrays:
                    filling.start(each, list(_mine(each, group.rank, loads)), group.rank)
                filling.finish()
            except BaseException:  # also Ctrl-C: what has not begun need not be read any more
                readers.shutdown(cancel_futures=True)
                raise

    on_all_ranks(group, fill_here, CheckpointError)


class _Filling:
    """Arrays that are being read; beside those that cannot be read into, of which there are AT_ONCE at most."""

    def __init__(self, reader: PartReader, readers: ThreadPoolExecutor) -> None:
        self._reader, self._readers = reader, readers
        self._beside = 0  # bytes
        self._under_way: deque[tuple[Wanted, np.ndarray, list[Future]]] = deque()

    def start(self, array: Wanted, blocks: Sequence[tuple[StoredBlock, bool]], rank: int) -> None:
        """Begin to read this rank's parts of these blocks, and all of those of which it is said to check them."""
        if not blocks:
            return
        host, (held,) = array.on_host(), array.placed.held[rank]
        reading = []
        for block, checked in blocks:
            part = block.rectangle & held
            place = host[(..., *part.within(held).index)]
            read = partial(self._reader.read, array.name, array.stored, block, part, place, checked=checked)
            if block.rectangle.size * host.itemsize < SMALL:
                read()
            else:
                reading.append(self._readers.submit(read))
        self._under_way.append((array, host, reading))
        self._beside += 0 if host is array.here else host.nbytes
        while self._beside > AT_ONCE:
            self._finish_first()

    def finish(self) -> None:
        """Wait until all are where they belong; raises what reading one of them raised."""
        while self._under_way:
            self._finish_first()

    def _finish_first(self) -> None:
        array, host, reading = self._under_way.popleft()
        for each in reading:
            each.result()
        if host is not array.here:
            array.here[...] = backend_of(array.here).asarray(host)
            self._beside -= host.nbytes


def _mine(array: Wanted, rank: int, loads: dict[int, int]) -> Iterator[tuple[StoredBlock, bool]]:
    """The blocks that a rank wants some of, and whether it is the one of its node that checks it.

    That is, of those who want some, who has least to check so far: ``loads``, bytes by rank, which grow.
    """
    blocks = array.stored.blocks
    ranks = _wanting(tuple(each.rectangle for each in blocks), array.placed.held)
    for block, wanting in zip(blocks, ranks, strict=True):
        near = [each for each in wanting if each in loads]
        if near:
            checks = min(near, key=loads.__getitem__)
            loads[checks] += block.rectangle.size * array.dtype.itemsize
            if rank in near:
                yield block, rank == checks


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
