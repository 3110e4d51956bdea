"""Memory that all ranks of a node can read and write: one arena for each rank, and arrays in it.

An array from ``Arena.empty`` is an ordinary array; its memory returns to the arena with its last view. The other ranks
of the node can address it by (arena, offset), so that a collective can read and write it in place.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.shared_memory.cores import control_groups
from spmd_engine.comm.shared_memory.cross_memory import CrossMemory

if TYPE_CHECKING:
    from spmd_engine.comm.shared_memory.slot_table import SlotTable

ALIGNMENT = 64  # bytes: a cache line
PAGE = 4096  # bytes
HEAD = PAGE + ALIGNMENT  # bytes at the beginning of every arena that are never allocated

logger = logging.getLogger(__name__)


class Arena:
    """The memory from which one rank allocates: first fit, to reuse memory that is still in caches.

    ``memory``: a writable buffer. Only the rank of the arena allocates.
    """

    def __init__(self, memory) -> None:
        self.memory = memory
        self.size = len(memory)
        self._free = [(HEAD, self.size)]  # (start, stop), sorted, adjacent ones merged
        self._leases: dict[int, _Lease] = {}
        self._returned: deque[_Lease] = deque()  # the garbage collector appends at any moment
        self._warned = False

    def allocate(self, size: int) -> int | None:
        """The offset of ``size`` aligned bytes; None if there is no room. Free them with ``release``.

        No block begins at a page: NumPy's large arrays lie 16 bytes behind the beginning of one, and processors of AMD
        copy 256 KiB twelve times as slowly to an address that is up to 31 bytes further in its page than the source.
        """
        self._take_back()
        size = aligned(size)
        for i, (free, stop) in enumerate(self._free):
            start = free if free % PAGE else free + ALIGNMENT
            if stop - start >= size:
                self._free[i : i + 1] = [part for part in ((free, start), (start + size, stop)) if part[0] < part[1]]
                return start
        if not self._warned:
            logger.warning(
                "the memory that ranks of this node share (%d MiB a rank) is used up: further arrays use "
                "ordinary memory and messages. Set SPMD_ARENA_MIB to enlarge it",
                self.size >> 20,
            )
            self._warned = True
        return None

    def return_freed(self) -> None:
        """Return the pages of free memory to the system; they are zero when they are next used."""
        self._take_back()
        if sys.platform != "linux" or not isinstance(self.memory, mmap.mmap):
            return
        for start, stop in self._free:
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                try:
                    self.memory.madvise(mmap.MADV_REMOVE, first, last - first)
                except OSError:  # of memory without a file, as virtual ranks have it
                    self.memory.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _take_back(self) -> None:
        """Free the memory of the arrays that have been collected."""
        while self._returned:
            lease = self._returned.popleft()
            self.release(lease.start, lease.size)
            del self._leases[lease.start]

    def release(self, start: int, size: int) -> None:
        """Free the bytes that ``allocate(size)`` returned."""
        stop = start + aligned(size)
        i = bisect(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (start, stop))

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray | None:
        """An uninitialized array of the arena; None if there is no room."""
        size = prod(shape) * dtype.itemsize
        if size == 0 or (start := self.allocate(size)) is None:
            return None
        owner = np.ndarray(size, np.uint8, self.memory, start)
        self._leases[start] = lease = _Lease(owner, self._returned.append)
        lease.start, lease.size = start, size
        return np.ndarray(shape, dtype, owner)

    @property
    def free(self) -> int:
        """Bytes that can still be allocated, in one piece or several."""
        returned = sum(aligned(lease.size) for lease in tuple(self._returned))
        return sum(stop - start for start, stop in self._free) + returned


class _Lease(weakref.ref):
    """Notifies the arena when an array is collected. (``weakref.finalize`` takes ten times as long.)"""

    __slots__ = ("start", "size")
    start: int
    size: int


class Neighbours:
    """All arenas of a node: ``memories`` by local rank, ``own`` to allocate from.

    ``cross_memory`` reads other memory of these ranks, if the system allows it.
    """

    def __init__(self, memories: Sequence, local_rank: int, cross_memory: CrossMemory | None = None) -> None:
        self.memories, self.local_rank, self.cross_memory = list(memories), local_rank, cross_memory
        self.own = Arena(self.memories[local_rank])
        self._address = address_of(np.frombuffer(self.own.memory, np.uint8))
        self._retired: list[SlotTable] = []

    def offset(self, x: np.ndarray) -> int | None:
        """Offset of contiguous ``x`` in this rank's arena; None if ``x`` is in ordinary memory."""
        if x.base is None:  # x owns its memory
            return None
        offset = address_of(x) - self._address
        return offset if 0 <= offset < self.own.size else None

    def can_read(self, x: np.ndarray) -> bool:
        """Whether other ranks can read ``x`` in memory that a driver may have mapped: this rank tries it."""
        if self.cross_memory is None or not x.size:
            return True  # it is copied to the arena
        return self.cross_memory.can_read(self.local_rank, address_of(x), x.reshape(-1).view(np.uint8)[:1].tobytes())

    def view(self, local_rank: int, offset: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """An array in another rank's arena."""
        return np.ndarray(shape, dtype, self.memories[local_rank], offset)

    def retire(self, table: SlotTable | None = None) -> None:
        """Close ``table`` and the retired tables that could not be closed before."""
        self._retired = [retired for retired in (*self._retired, table) if retired is not None and not retired.close()]


def bound(ranks: int) -> int:
    """Bytes of the arena of each of ``ranks`` on this node: together half of its memory, or SPMD_ARENA_MIB each.

    Pages that are never written take no memory.
    """
    if (mebibytes := os.environ.get("SPMD_ARENA_MIB", "")).isdecimal():
        return int(mebibytes) << 20
    return memory_here() // 2 // ranks >> 20 << 20


@cache
def memory_here() -> int:
    """Bytes of memory that processes on this node may use."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in control_groups("memory"):
        for name in "memory.max", "memory.limit_in_bytes":
            with suppress(OSError):
                text = Path(group, name).read_text().strip()
                memory = min(memory, int(text) if text.isdecimal() else memory)
    return memory


def aligned(size: int) -> int:
    """The least multiple of ``ALIGNMENT`` from ``size`` on."""
    return -(-size // ALIGNMENT) * ALIGNMENT
