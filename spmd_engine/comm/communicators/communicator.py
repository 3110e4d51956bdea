"""The protocol of a communicator: ranks, messages between two of them, waits, and the ends of programs.

Collectives, checks and waits use only this, so MPI processes and threads of one process run the same code. What they
use besides messages is in ``comm/connections.py``. An implementation writes the seven abstract methods, and passes
``__init__`` the facts that it knows; all else has defaults. See "Add a communicator" in docs/collectives.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.pending import TIMEOUT, Progress


class Ranks(ABC):
    """Ranks that exchange messages, including this one. Messages of one (sender, receiver, tag) arrive in the order
    sent."""

    rank: int
    size: int

    @abstractmethod
    def start_send(self, data: Array, to: int, tag: int) -> list:
        """Start to send contiguous ``data``, which is not empty, and must not change until done; returns requests.
        Tags are from 0 to 32,766."""

    @abstractmethod
    def start_receive(self, data: Array, source: int, tag: int) -> list:
        """Start to receive into contiguous ``data`` (a shorter message fills its beginning); returns requests."""

    @abstractmethod
    def done(self, requests: list) -> bool:
        """Whether all requests have completed. Advances messages; never blocks."""

    def outer(self, rank: int) -> int:
        """The number of ``rank`` in the communicator."""
        return rank


class Communicator(Ranks):
    """An ordered set of ranks of the world."""

    spin_tests = 0  #: tests of a condition before the rank yields the processor; 0: ranks outnumber cores
    in_one_process = False  #: whether all ranks are threads of this process
    is_device_aware = False  #: whether messages can be arrays on devices
    connections: Any = None  #: what calls keep for these ranks: see ``connections.connections_of``

    def __init__(self, members: Sequence[int], rank: int, hosts: Sequence[str], progress: Progress) -> None:
        """``members``: the ranks of the world; this one is number ``rank`` of them. ``hosts``: the name of the host of
        each. ``progress``: the operations of this rank, the same for all of its communicators."""
        self.members, self.rank, self.size = list(members), rank, len(members)
        self.hosts, self.node, self.progress = list(hosts), hosts[rank], progress
        self.line = progress.activity.line(members)  #: where this rank's calls are published

    def subset(self, ranks: Sequence[int], timeout: float | None = TIMEOUT) -> Communicator:
        """A communicator of these ranks in this order. Only they call it, and wait for each other up to ``timeout``."""
        subset = self.create_subset(ranks, timeout)
        if self.connections is not None:
            self.connections.pass_on(subset)
        return subset

    @abstractmethod
    def create_subset(self, ranks: Sequence[int], timeout: float | None) -> Communicator:
        """See ``subset``."""

    def free(self) -> None:
        """Release the resources of a sub-communicator. Collective."""
        if self.connections is not None:
            self.connections.close()
        self.progress.activity.close(self.line)

    def start_progress_thread(self) -> None:
        """Let calls advance while this rank computes, where a thread can do that."""

    def prepare_to_pause(self, idle: int) -> None:
        """Called before the last test of a condition: a change from now on ends the following ``pause``."""

    @abstractmethod
    def pause(self, idle: int, messages: bool = True) -> None:
        """Yield the processor for a moment, the ``idle``-th time in a row without progress.

        ``messages``: whether the rank waits for messages, for which it must poll; ranks that write to a slot table wake
        the others. Raises RankAborted if another rank has failed.
        """

    @abstractmethod
    def announce_end(self) -> None:
        """Report that this rank's program has ended to the ranks of the world that request it, now or later."""

    @abstractmethod
    def ended(self, awaited: Sequence[int]) -> list[int]:
        """The ``awaited`` ranks that are known to have ended their programs; the others are requested to report it."""


class MessagePart(Ranks):
    """Some ranks of a communicator, including this one, in any order, to exchange messages."""

    def __init__(self, communicator: Communicator, members: Sequence[int]) -> None:
        self.members = list(members)  #: ranks of the communicator
        self.rank, self.size = self.members.index(communicator.rank), len(self.members)
        self._communicator = communicator

    def outer(self, rank: int) -> int:
        return self.members[rank]

    def start_send(self, data: Array, to: int, tag: int) -> list:
        return self._communicator.start_send(data, self.members[to], tag)

    def start_receive(self, data: Array, source: int, tag: int) -> list:
        return self._communicator.start_receive(data, self.members[source], tag)

    def done(self, requests: list) -> bool:
        return self._communicator.done(requests)
