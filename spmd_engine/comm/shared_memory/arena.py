"""Memory that all ranks of a node can read and write: one arena for each rank, arrays in it, and how they are mapped.

An array from ``Arena.empty`` is an ordinary array; its memory returns to the arena with its last view. The other ranks
of the node can address it by (arena, offset), so that a collective can read and write it in place.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import sys
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.shared_memory.cores import control_groups
from spmd_engine.comm.shared_memory.cross_memory import CrossMemory, allow_reading
from spmd_engine.comm.shared_memory.futex import Futexes

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


# --- The ranks of an MPI job on one node, which map each other's memory
#
# Each rank creates an anonymous file in memory (memfd) and sends the others its process and descriptor; they open it
# through /proc and map it. The file has no name that could remain after the processes end, and does not count against
# the size of /dev/shm. Where this does not work (processes in different containers, systems other than Linux), ranks
# use messages.


_TOKEN = 16  # random bytes at the beginning of an arena that identify it
_FUTEXES = 64  # offset of the ranks' futex words in the arena of the node's first rank
_ENDS = 3072  # offset of a byte for each rank: 1 if its program has ended
MOST_RANKS = 512  # of a node: room of the futex words and end bytes


class Node:
    """Memory and futexes that the ranks of a node share.

    ``ranks``: of the node, numbered in the world. ``kept``: bytes of the first rank's arena, from HEAD on, that are
    reserved for all ranks.
    """

    def __init__(
        self, memories: Sequence, ranks: Sequence[int], rank: int, cross_memory: CrossMemory | None, kept: int
    ) -> None:
        self.ranks = list(ranks)
        local_rank = self.ranks.index(rank)
        self.neighbours = Neighbours(memories, local_rank, cross_memory)
        self.futexes = Futexes(memoryview(memories[0])[_FUTEXES : _FUTEXES + 4 * len(ranks)], local_rank)
        self._ended = memoryview(memories[0])[_ENDS : _ENDS + len(ranks)]
        if local_rank == 0:
            self.neighbours.own.allocate(kept)  # the first block, at offset HEAD

    def announce_end(self) -> None:
        self._ended[self.neighbours.local_rank] = 1

    def ended(self) -> list[int]:
        """The node's ranks whose programs have ended."""
        return [rank for rank, ended in zip(self.ranks, self._ended, strict=True) if ended]


def open_node(rank: int, ranks: Sequence[int], kept: int, gather_texts: Callable[[str], list[str]]) -> Node | None:
    """Map the memory of all ``ranks`` of this node, with this ``rank``; None if not possible. Collective.

    ``kept``: see ``Node``. ``gather_texts``: gathers a text of each of the ``ranks``.
    """
    size = bound(len(ranks)) if 1 < len(ranks) <= MOST_RANKS else 0
    if size < HEAD + kept:
        size = 0
    wants_memory = size > 0
    own_memory = OwnMemory(size if os.environ.get("SPMD_ARENA", "memfd") == "memfd" else 0)
    handles = gather_texts(own_memory.handle)
    memories = mapped(handles)
    cross_memory = _cross_memory(handles) if memories else None
    answers = gather_texts(f"{'yes' if memories or not wants_memory else 'no'} {'reads' if cross_memory else ''}")
    own_memory.close()  # all ranks have tried to open the file
    all_mapped = all(answer.startswith("yes") for answer in answers)
    if not all(answer.endswith("reads") for answer in answers):
        cross_memory = None
    if wants_memory and not all_mapped and rank == ranks[0]:
        limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        why = "their addresses are limited: ulimit -v" if limited else "memfd"
        message = "ranks of this node cannot open each other's memory (%s): they use messages instead, which are slower"
        logger.warning(message, why)
    return Node(memories, ranks, rank, cross_memory, kept) if wants_memory and all_mapped and memories else None


class OwnMemory:
    """This rank's anonymous file, until the others have opened it by ``handle``; size 0: no file."""

    def __init__(self, size: int) -> None:
        self.handle, self._descriptor = "", None
        self._probe = np.frombuffer(os.urandom(_TOKEN), np.uint8)  # to test whether others can read this process
        with suppress(OSError, AttributeError):
            if size:
                self._descriptor = os.memfd_create("spmd_engine", os.MFD_CLOEXEC)
                os.fchmod(self._descriptor, 0o600)  # memfd_create ignores the umask
                os.ftruncate(self._descriptor, size)
                allow_reading()
                token = os.urandom(_TOKEN)
                os.pwrite(self._descriptor, token, 0)
                probe = f"{address_of(self._probe)} {self._probe.tobytes().hex()}"
                self.handle = f"{os.getpid()} {self._descriptor} {size} {token.hex()} {probe}"

    def write(self, arrays: Iterable[np.ndarray], at: int) -> None:
        """Write contiguous arrays one after another, from byte ``at`` on.

        It writes to the file: the first write to mapped memory causes a fault for every page, which the system first
        fills with zeros; that takes twice as long.
        """
        assert self._descriptor is not None
        with open(self._descriptor, "r+b", closefd=False) as file:
            file.seek(at)
            for x in arrays:
                file.write(x.reshape(-1).view(np.uint8).data)

    def map(self) -> memoryview | None:
        """The file mapped into memory; None without a file."""
        return memoryview(mmap.mmap(self._descriptor, 0)) if self._descriptor is not None and self.handle else None

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def mapped(handles: Sequence[str]) -> list | None:
    """The mapped files of all ``handles``; None unless all can be mapped."""
    memories = []
    for handle in handles:
        try:
            process, descriptor, size, token, *_ = handle.split()
            file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                memories.append(mmap.mmap(file, int(size)))
            finally:
                os.close(file)
        except (OSError, ValueError):
            return None
        if memories[-1][:_TOKEN].hex() != token:  # another process with this number, in a different container
            return None
    return memories


def _cross_memory(handles: Sequence[str]) -> CrossMemory | None:
    """A reader of the memory of the processes of ``handles``; None if the system refuses."""
    fields = [handle.split() for handle in handles]
    cross_memory = CrossMemory([int(process) for process, *_ in fields])
    readable = [cross_memory.can_read(i, int(at), bytes.fromhex(probe)) for i, (*_, at, probe) in enumerate(fields)]
    return cross_memory if all(readable) else None
