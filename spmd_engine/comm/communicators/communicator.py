"""Interface of a communicator: ranks, and nonblocking messages between two of them.

Collectives, checks and waits use only this interface, so MPI processes and threads of one process run the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.dispatch import Tuning
from spmd_engine.comm.pending import TIMEOUT, Condition, Progress
from spmd_engine.comm.shared_memory.arena import Neighbours
from spmd_engine.comm.shared_memory.slot_table import SlotTable
from spmd_engine.comm.transports.nccl import NcclRanks
from spmd_engine.runtime.activity import Line

if TYPE_CHECKING:
    from spmd_engine.arrays.backend import CudaBackend
    from spmd_engine.comm.transports.hierarchical import Lanes
    from spmd_engine.comm.transports.mpi import NonblockingCollectives


class CallOrder:
    """The calls of a communicator in the order in which they were made. The MPI library's collectives must start in
    this order: each call waits until all earlier ones have started their last."""

    def __init__(self) -> None:
        self._open: list[int] = []  # ascending

    def enter(self, number: int) -> None:
        """Add a call that may have data to move; the last one so far."""
        self._open.append(number)

    def finish(self, number: int) -> None:
        """Call ``number`` has started its last collective, or needs none."""
        if number in self._open:
            self._open.remove(number)

    def wait(self, number: int) -> Iterator[Condition]:
        """Continue when all calls before ``number`` have finished."""
        if self._open[0] != number:
            yield Condition(lambda: self._open[0] == number, lambda rank: False)


class Port(Protocol):
    """Where rank 0 of a running world meets rank 0 of another one, whose ranks join it: see ``world.merged``."""

    name: str  #: by which the other rank connects

    def is_connected(self) -> bool:
        """Whether both ranks are here; never blocks. Raises UsageError if the other one did not come in time."""
        ...

    def send(self, text: str) -> None:
        """Send a text to the other rank."""
        ...

    def receive(self) -> str | None:
        """The text that the other rank has sent; None before it arrives."""
        ...

    def close(self) -> None:
        """End its use; waits for an attempt to connect."""
        ...


class Communicator(ABC):
    """An ordered set of ranks. Messages of one (sender, receiver, tag) arrive in the order sent."""

    rank: int
    size: int
    node: str  #: name of this rank's host
    hosts: Sequence[str]  #: names of all ranks' hosts
    progress: Progress  #: this rank's operations, shared by all sub-communicators
    tuning: Tuning = Tuning()
    call_order: CallOrder  #: of calls that may use ``collectives``, ``lane_collectives`` or ``nccl``
    line: Line  #: where this rank's calls are published
    calls = 0  #: collectives started so far; equal on all ranks, also if several meshes share this communicator
    in_one_process = False  #: whether all ranks are threads of this process
    library_is_device_aware = False  #: whether messages can be arrays on devices
    device_aware = False  #: whether they are: see ``set_transport``
    transport_is_chosen = False  #: by ``device_transport.choose_transport``
    spin_tests = 0  #: tests of a condition before the rank yields the processor; 0: ranks outnumber cores
    neighbours: Neighbours | None = None  #: memory shared with the ranks of this node, if available
    table: SlotTable | None = None  #: of this communicator's ranks, if all share one node's memory
    lanes: Lanes | None = None  #: ranks by nodes, if there are several nodes with equally many ranks
    collectives: NonblockingCollectives | None = None  #: the MPI library's, between nodes
    lane_collectives: NonblockingCollectives | None = None  #: the same for this rank's lane
    nccl: NcclRanks | None = None  #: NCCL between the devices of the ranks; None: their arrays take other routes

    def __init__(self) -> None:
        self.call_order = CallOrder()
        self._messages: defaultdict[tuple[str, int], count] = defaultdict(count)

    @property
    def node_table(self) -> SlotTable | None:
        """The slot table of the communicator's ranks on this node, if there is one."""
        return self.lanes.table if self.lanes else self.table

    def next_call(self, text: int = 0) -> int:
        """The number of the call that begins now; ``text``: number of its description, see ``Activity.called``."""
        self.calls = number = self.calls + 1
        words = self.line.words
        words[0], words[1] = number, text
        return number

    def next_message(self, direction: str, rank: int) -> int:
        """The number of this message among those to or from one other rank."""
        return next(self._messages[direction, rank])

    def empty(self, shape: Sequence[int], dtype) -> np.ndarray:
        """An uninitialized array, in memory that the node's ranks share, if there is room."""
        dtype = np.dtype(dtype)
        x = None
        if self.neighbours and not dtype.hasobject:
            with self.progress.lock:
                x = self.neighbours.own.empty(shape, dtype)
        return x if x is not None else np.empty(shape, dtype)

    def set_transport(self, device_aware: bool, backend: CudaBackend | None) -> None:
        """Decide how device arrays travel: by NCCL from ``backend``'s device, if given; else by messages, directly if
        ``device_aware``. Collective; later subsets take this over."""
        self.device_aware = device_aware
        if backend is None or self.nccl is None or self.nccl.backend is not backend:
            self.close_nccl()
            self.nccl = NcclRanks(self, backend) if backend is not None and self.size > 1 else None

    def start_progress_thread(self) -> None:
        """Let calls advance while this rank computes, where a thread can do that."""

    def close_nccl(self) -> None:
        """End the use of NCCL. Collective."""
        if self.nccl is not None:
            self.nccl.close()
            self.nccl = None

    def inherit_transport(self, parent: Communicator) -> Self:
        """Send device arrays as ``parent`` does."""
        self.set_transport(parent.device_aware, parent.nccl.backend if parent.nccl is not None else None)
        self.transport_is_chosen = parent.transport_is_chosen
        return self

    def outer(self, rank: int) -> int:
        """``rank`` itself; ``transports.messages.MessagePart`` maps its ranks to the communicator's."""
        return rank

    @abstractmethod
    def start_send(self, data: Array, to: int, tag: int) -> list:
        """Start to send contiguous ``data``, which must not change until done; returns requests."""

    @abstractmethod
    def start_receive(self, data: Array, source: int, tag: int) -> list:
        """Start to receive into contiguous ``data`` (a shorter message fills its beginning); returns requests."""

    @abstractmethod
    def done(self, requests: list) -> bool:
        """Whether all requests have completed. Advances messages; never blocks."""

    @abstractmethod
    def subset(self, ranks: Sequence[int], timeout: float | None = TIMEOUT) -> Communicator:
        """A communicator of these ranks in this order. Only they call it, and wait for each other up to ``timeout``."""

    @abstractmethod
    def free(self) -> None:
        """Release the resources of a sub-communicator."""

    @abstractmethod
    def prepare_to_pause(self, idle: int) -> None:
        """Called before the last test of a condition: a change from now on ends the following ``pause``."""

    @abstractmethod
    def announce_end(self) -> None:
        """Report that this rank's program has ended to the ranks of the world that request it, now or later."""

    @abstractmethod
    def ended(self, awaited: Sequence[int]) -> list[int]:
        """The ``awaited`` ranks that are known to have ended their programs; the others are requested to report it."""

    @abstractmethod
    def pause(self, idle: int, messages: bool = True) -> None:
        """Yield the processor for a moment, the ``idle``-th time in a row without progress.

        ``messages``: whether the rank waits for messages, for which it must poll; ranks that write to a slot table wake
        the others. Raises RankAborted if another rank has failed.
        """
