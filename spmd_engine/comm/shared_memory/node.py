"""The ranks of an MPI job that share a node, and how they come by each other's memory.

Each rank makes an anonymous file in memory (memfd) and tells the others its process and descriptor; they open it
through /proc and map it. It has no name that could stay behind, however the processes end, and does not count against
the size of /dev/shm. Where that does not work (processes that do not see each other, systems other than Linux), all
goes by messages.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import numpy as np

from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.shared_memory.arena import HEAD, Neighbours, bound
from spmd_engine.comm.shared_memory.cross_memory import CrossMemory, allow_reading
from spmd_engine.comm.shared_memory.futex import Futexes

_TOKEN = 16  # bytes at the beginning of an arena, by which the others know that it is the right one
_FUTEXES = 64  # where the words of the ranks' futexes begin, in the arena of the node's first rank
_ENDS = 3072  # where there is a byte for each rank, 1 when its program has ended
MOST_RANKS = 512  # for which there is room

logger = logging.getLogger(__name__)


class Node:
    """What a rank shares with the others of its node: memory, and the futexes.

    ``ranks`` are the node's by their ranks in the world. ``kept`` bytes of the first one's arena, from HEAD on, are
    theirs to use in common from the beginning.
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
            self.neighbours.own.allocate(kept)  # the first block: everyone knows where it is

    def announce_end(self) -> None:
        self._ended[self.neighbours.local_rank] = 1

    def ended(self) -> list[int]:
        """Ranks of the node whose programs have ended."""
        return [rank for rank, ended in zip(self.ranks, self._ended, strict=True) if ended]


def open_node(rank: int, ranks: Sequence[int], kept: int, tell: Callable[[str], list[str]]) -> Node | None:
    """Map the memory of all ``ranks`` of this node, of which this is ``rank``; or None. All of the world come here.

    ``kept``: see ``Node``. ``tell`` tells all ranks of the world a text, and returns theirs.
    """
    size = bound(len(ranks)) if 1 < len(ranks) <= MOST_RANKS else 0
    if size < HEAD + kept:
        size = 0
    wanted = size > 0
    own = OwnMemory(size if os.environ.get("SPMD_ARENA", "memfd") == "memfd" else 0)
    said = [text for each, text in enumerate(tell(own.told)) if each in ranks]
    memories = mapped(said)
    cross_memory = _cross_memory(said) if memories else None
    answers = tell(f"{'yes' if memories or not wanted else 'no'} {'reads' if cross_memory else ''}")
    own.close()  # all have opened what they could
    fine = all(answers[rank].startswith("yes") for rank in ranks)
    if not all(answers[rank].endswith("reads") for rank in ranks):
        cross_memory = None
    if wanted and not fine and rank == ranks[0]:
        logger.warning("ranks of this node cannot open each other's memory (memfd): they use messages instead")
    return Node(memories, ranks, rank, cross_memory, kept) if wanted and fine and memories else None


class OwnMemory:
    """This rank's anonymous file, until the others have opened it; of size 0: none. ``told`` is how they find it."""

    def __init__(self, size: int) -> None:
        self.told, self._descriptor = "", None
        self._probe = np.frombuffer(os.urandom(_TOKEN), np.uint8)  # to try whether others can read this process
        with suppress(OSError, AttributeError):
            if size:
                self._descriptor = os.memfd_create("spmd_engine", os.MFD_CLOEXEC)
                os.fchmod(self._descriptor, 0o600)  # made with 0777, whatever the umask
                os.ftruncate(self._descriptor, size)
                allow_reading()
                token = os.urandom(_TOKEN)
                os.pwrite(self._descriptor, token, 0)
                probe = f"{address_of(self._probe)} {self._probe.tobytes().hex()}"
                self.told = f"{os.getpid()} {self._descriptor} {size} {token.hex()} {probe}"

    def write(self, arrays: Iterable[np.ndarray], at: int) -> None:
        """Write contiguous arrays one behind the other, from byte ``at`` on.

        Through the file: where mapped memory is written to first, the system is interrupted page by page, and fills
        each with zeros, which takes twice as long.
        """
        assert self._descriptor is not None
        with open(self._descriptor, "r+b", closefd=False) as file:
            file.seek(at)
            for x in arrays:
                file.write(x.reshape(-1).view(np.uint8))

    def map(self) -> mmap.mmap | None:
        """The memory; None where there is none."""
        return mmap.mmap(self._descriptor, 0) if self.told else None

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def mapped(texts: Sequence[str]) -> list | None:
    """The memory of all ranks that told these texts; None unless all can be had."""
    memories = []
    for text in texts:
        try:
            process, descriptor, size, token, *_ = text.split()
            opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                memories.append(mmap.mmap(opened, int(size)))
            finally:
                os.close(opened)
        except (OSError, ValueError):
            return None
        if memories[-1][:_TOKEN].hex() != token:  # another process of that number: we live in different containers
            return None
    return memories


def _cross_memory(texts: Sequence[str]) -> CrossMemory | None:
    """What reads the memory of the ranks that told these texts, if the system lets it."""
    told = [text.split() for text in texts]
    cross_memory = CrossMemory([int(process) for process, *_ in told])
    can = [cross_memory.can_read(i, int(at), bytes.fromhex(probe)) for i, (*_, at, probe) in enumerate(told)]
    return cross_memory if all(can) else None
