"""The port at which the first ranks of two jobs of MPI meet, so that the ranks of one join the other."""

from __future__ import annotations

from math import ceil
from threading import Thread

from mpi4py import MPI

from spmd_engine.errors import UsageError

_JOINING = 32763  # a tag of messages between them


class MPIPort:
    """A Port between two jobs of MPI, as ``ThreadPort``: opened, or, with a ``name``, that of the other job.

    A thread waits for the other rank, up to ``timeout`` seconds, as MPI waits only inside a call.
    """

    def __init__(self, name: str, timeout: float) -> None:
        if not MPI.Get_library_version().startswith("MPICH") or MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise UsageError("ranks can join a job of MPICH with threads; this MPI library is another one")
        self._joins, self._timeout, self._why = bool(name), timeout, ""
        self.name = name or MPI.Open_port()
        self.leaders: MPI.Intracomm | None = None  #: both ranks
        self._sent: list[MPI.Request] = []
        self._thread = Thread(target=self._connect, name="spmd_engine port", daemon=True)
        self._thread.start()

    def _connect(self) -> None:
        info = MPI.Info.Create()
        info.Set("timeout", str(ceil(self._timeout)))
        try:
            pair = (MPI.COMM_SELF.Connect if self._joins else MPI.COMM_SELF.Accept)(self.name, info)
            self.leaders = pair.Merge(self._joins)
            pair.Free()
        except MPI.Exception as error:
            self._why = f"they did not connect in {self._timeout:g} s ({error.Get_error_string()})"
        finally:
            info.Free()

    def is_connected(self) -> bool:
        if self._why:
            raise UsageError(self._why)
        return self.leaders is not None

    def send(self, text: str) -> None:
        assert self.leaders is not None
        self._sent.append(self.leaders.Isend([text.encode(), MPI.BYTE], 1 - self.leaders.rank, _JOINING))

    def receive(self) -> str | None:
        status = MPI.Status()
        if self.leaders is None or not self.leaders.Iprobe(1 - self.leaders.rank, _JOINING, status):
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        self.leaders.Recv([data, MPI.BYTE], 1 - self.leaders.rank, _JOINING)  # it has arrived: no wait
        return data.decode()

    def close(self) -> None:
        self._thread.join()
        if not self._joins:
            MPI.Close_port(self.name)

    @staticmethod
    def merge(own: MPI.Intracomm, port: MPIPort | None, joins: bool) -> MPI.Intracomm:
        """A communicator of the ranks of both worlds, those that join after the others. Collective; ``own``: of this
        world, whose rank 0 has the ``port``."""
        leaders = port.leaders if port else None
        both = own.Create_intercomm(0, leaders or MPI.COMM_SELF, 0 if joins else 1, _JOINING)
        merged = both.Merge(joins)
        both.Free()
        if port and leaders:
            MPI.Request.Waitall(port._sent)
            leaders.Free()
        return merged
