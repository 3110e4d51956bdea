"""What a transport must offer: ranks, and messages between two of them that never block.

Everything else (collectives, checks, waiting) is written once on top of this, so MPI processes and threads
of one process run the same collective code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.condition import Turns
from spmd_engine.comm.dispatch import Tuning
from spmd_engine.comm.pending import TIMEOUT, Progress
from spmd_engine.comm.shared_memory.arena import Neighbours
from spmd_engine.comm.shared_memory.slot_table import SlotTable
from spmd_engine.runtime.activity import Line

if TYPE_CHECKING:
    from spmd_engine.comm.transports.hierarchical import Lanes
    from spmd_engine.comm.transports.mpi import NonblockingCollectives


class Communicator(ABC):
    """An ordered set of ranks. Messages of one (sender, receiver, tag) arrive in the order sent."""

    rank: int
    size: int
    node: str  #: name of the host this rank runs on
    hosts: Sequence[str]  #: the same of every rank
    progress: Progress  #: this rank's outstanding operations, shared with every sub-communicator
    tuning: Tuning = Tuning()
    turns: Turns  #: of the calls that may use ``collectives`` or ``lane_collectives``
    line: Line  #: where this rank's calls are published
    calls = 0  #: collectives begun here; equal on all ranks, whichever meshes share this communicator
    device_aware = False  #: whether device arrays may be handed to it as they are
    spin_tests = 0  #: how often to test for what is waited for before giving way; 0: not all have a core
    neighbours: Neighbours | None = None  #: memory shared with ranks of this node, where it can be had
    table: SlotTable | None = None  #: where this communicator's ranks meet, if all are on one node and share memory
    lanes: Lanes | None = None  #: the ways between its nodes, if there are several, with as many ranks each
    collectives: NonblockingCollectives | None = None  #: the MPI library's, of these ranks, for calls between nodes
    lane_collectives: NonblockingCollectives | None = None  #: the same for this rank's lane

    @property
    def node_table(self) -> SlotTable | None:
        """The table of those of its ranks that are on this node, if there is one; calls take its slots in turn."""
        return self.lanes.table if self.lanes else self.table

    def next_call(self, text: int = 0) -> int:
        """The number of the call that begins now; ``text``: the number of what it is, see ``Activity.called``."""
        self.calls = number = self.calls + 1
        words = self.line.words
        words[0], words[1] = number, text
        return number

    def next_message(self, way: str, rank: int) -> int:
        """The number of this message among those to, or from, one other rank."""
        return next(self.__dict__.setdefault("_messages", defaultdict(count))[way, rank])

    def empty(self, shape: Sequence[int], dtype) -> np.ndarray:
        """An array of any values, in memory that the node's ranks share if there is some left."""
        dtype = np.dtype(dtype)
        x = None
        if self.neighbours and not dtype.hasobject:
            with self.progress.lock:
                x = self.neighbours.own.empty(shape, dtype)
        return x if x is not None else np.empty(shape, dtype)

    def outer(self, rank: int) -> int:
        """The number of ``rank`` in this communicator: the same; see ``transports.messages.MessagePart``."""
        return rank

    @abstractmethod
    def start_send(self, data: Array, to: int, tag: int) -> list:
        """Begin to send contiguous ``data`` (it must not change until done); returns requests."""

    @abstractmethod
    def start_receive(self, data: Array, source: int, tag: int) -> list:
        """Begin to fill contiguous ``data`` (a shorter message fills its beginning); returns requests."""

    @abstractmethod
    def done(self, requests: list) -> bool:
        """Whether all requests have completed. Moves messages on; never blocks."""

    @abstractmethod
    def subset(self, ranks: Sequence[int], timeout: float | None = TIMEOUT) -> Communicator:
        """A communicator of these ranks in this order; only they call it, and wait so many seconds for each other."""

    @abstractmethod
    def free(self) -> None:
        """Give back what a sub-communicator holds."""

    @abstractmethod
    def prepare_to_pause(self, idle: int) -> None:
        """Called before looking once more: what comes from now on ends the pause after it."""

    @abstractmethod
    def announce_end(self) -> None:
        """Tell those ranks of the world that have asked, or will see it, that this rank's program has ended."""

    @abstractmethod
    def ended(self, suspects: Sequence[int]) -> list[int]:
        """Those of these ranks of this communicator whose programs are known to have ended; the others are asked."""

    @abstractmethod
    def pause(self, idle: int, messages: bool = True) -> None:
        """Leave the processor to others for a moment, the ``idle``-th time in a row without progress.

        ``messages``: whether some are waited for. Those must be looked for; who writes on a table wakes others.
        Raises RankAborted if another rank has failed meanwhile.
        """
