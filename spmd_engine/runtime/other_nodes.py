"""Messages between nodes outside the calls of a program: reports of a hang, and queries whether a rank has ended.

No receive is posted for them, and a rank may end before it has checked for the last one. If a message was sent and
never received, MPICH's launcher takes a rank's exit for a crash and kills the others. So messages are counted: at the
end all ranks add up how many were sent to each, and receive the rest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from threading import Lock

import numpy as np
from mpi4py import MPI

from spmd_engine.runtime.activity import State
from spmd_engine.runtime.watchdog import FRESH

ENDED, ASK, REPORT = range(32764, 32767)  #: tags; no larger ones are allowed by every MPI


class SideMessages:
    """The side messages of one rank, over MPI's ``comm``, for all its threads."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm, self._lock = comm, Lock()
        self._sent, self._received = np.zeros(comm.size, np.int64), 0
        self._under_way: list[MPI.Request] = []
        self._closed = False

    def send(self, data: bytes, ranks: Sequence[int], tag: int) -> None:
        """Begin to send ``data`` to each of the ranks."""
        with self._lock:
            if not self._closed:
                self._under_way = [request for request in self._under_way if not request.Test()]
                self._under_way += [self._comm.Isend([data, MPI.BYTE], rank, tag) for rank in ranks]
                np.add.at(self._sent, list(ranks), 1)

    def receive(self, tag: int = MPI.ANY_TAG) -> list[tuple[int, bytes]]:
        """The messages of this tag that have arrived: source and data."""
        messages, status = [], MPI.Status()
        with self._lock:
            while self._comm.Iprobe(MPI.ANY_SOURCE, tag, status):
                data = bytearray(status.Get_count(MPI.BYTE))
                self._comm.Recv([data, MPI.BYTE], status.source, status.tag)  # it has arrived: no wait
                messages.append((status.source, bytes(data)))
            self._received += len(messages)
        return messages

    def close(self) -> np.ndarray:
        """Stop sending; returns the number of messages that this rank has sent to each."""
        with self._lock:
            self._closed = True
        return self._sent

    def receive_rest(self, sent_here: int) -> None:
        """Receive until all ``sent_here`` messages to this rank have arrived, and its own sends are complete.

        Every rank calls this after all are closed.
        """
        while self._received < sent_here or not MPI.Request.Testall(self._under_way):
            if not self.receive():
                time.sleep(1e-3)


class OtherNodes:
    """The states of ranks of other nodes, for a watchdog. ``here`` are the ranks of its own node."""

    def __init__(self, messages: SideMessages, size: int, here: Sequence[int]) -> None:
        self._messages = messages
        self._others = sorted(set(range(size)) - set(here))
        self._heard: dict[int, tuple[float, State]] = {}
        self.reported = 0.0  #: when one of them last reported a hang, by this process's clock
        self.begun = list[float]()  #: when their overdue waits began, by this process's clock

    def send_states(self, states: Sequence[State]) -> None:
        """Send the states to every rank of other nodes, since any of them may have stopped."""
        self._messages.send(json.dumps(states).encode(), self._others, REPORT)

    def heard(self) -> list[State]:
        """The newest state of each rank that was received in the last FRESH seconds."""
        now = time.monotonic()
        for _, data in self._messages.receive(REPORT):
            states = [State.from_json(content) for content in json.loads(data)]
            self._heard.update({state.rank: (now, state) for state in states})
            self.reported = max(self.reported, *(now - state.reported_seconds for state in states))
        fresh = [(when, state) for when, state in self._heard.values() if now - when < FRESH]
        self.begun = [when - state.wait.seconds for when, state in fresh if state.wait and state.wait.overdue]
        return [state for _, state in fresh]
