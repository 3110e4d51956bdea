"""What nodes tell each other of a hang: over a communicator of its own, and only once there is one."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence

from mpi4py import MPI

from spmd_engine.watchdog.records import State
from spmd_engine.watchdog.watchdog import FRESH


class OtherNodes:
    """The ranks of other nodes, as one rank's watchdog hears of them. ``here`` are those that it sees itself."""

    def __init__(self, comm: MPI.Comm, here: Sequence[int]) -> None:
        self._comm = comm.Dup()
        self._others = [rank for rank in range(comm.size) if rank not in set(here)]
        self._sent: list[MPI.Request] = []
        self._heard: dict[int, tuple[float, State]] = {}

    def tell(self, states: Sequence[State]) -> None:
        """Tell every rank of other nodes: nobody knows which of them still listens."""
        data = pickle.dumps(list(states))
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent += [self._comm.Isend([data, MPI.BYTE], to) for to in self._others]

    def heard(self) -> list[State]:
        """What was told in the last seconds, the newest of each rank."""
        status, now = MPI.Status(), time.monotonic()
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            data = bytearray(status.Get_count(MPI.BYTE))
            self._comm.Recv([data, MPI.BYTE], status.source, status.tag)
            self._heard.update({state.rank: (now, state) for state in pickle.loads(data)})
        return [state for when, state in self._heard.values() if now - when < FRESH]
