"""The ranks of an MPI job on one node, which map each other's memory.

Each rank creates an anonymous file in memory (memfd) and sends the others its process and descriptor; they open it
through /proc and map it. The file has no name that could remain after the processes end, and does not count against
the size of /dev/shm. Where this does not work (processes in different containers, systems other than Linux), ranks use
messages.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import numpy as np

from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.shared_memory.arena import HEAD, Neighbours, bound
from spmd_engine.comm.shared_memory.cross_memory import CrossMemory, allow_reading
from spmd_engine.comm.shared_memory.futex import Futexes

_TOKEN = 16  # random bytes at the beginning of an arena that identify it
_FUTEXES = 64  # offset of the ranks' futex words in the arena of the node's first rank
_ENDS = 3072  # offset of a byte for each rank: 1 if its program has ended
MOST_RANKS = 512  # of a node: room of the futex words and end bytes

logger = logging.getLogger(__name__)


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
