"""The ranks of this job, and the setup of a rank that joins them."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Union

from threadpoolctl import threadpool_limits

from spmd_engine.arrays.memory import keep_freed_memory
from spmd_engine.comm.agreement.tree import gather_texts
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.communicators.threads import ThreadCommunicator, ThreadPort, current_thread_communicator, solo
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import TIMEOUT, Progress
from spmd_engine.comm.shared_memory.arena import OwnMemory, mapped
from spmd_engine.comm.shared_memory.cores import cores_here, cores_of, quota_here
from spmd_engine.errors import SpmdError, UsageError
from spmd_engine.runtime import launchers
from spmd_engine.runtime.activity import SIZE, Activity, Record
from spmd_engine.runtime.ending import FAILED, end_all_ranks_on_error, leave_at_exit, prints_error, stay_at_exit
from spmd_engine.runtime.join import join_mpi
from spmd_engine.runtime.signals import StopFlag
from spmd_engine.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from spmd_engine.comm.communicators.mpi import MPICommunicator, MPIPort


def world() -> Communicator:
    """All ranks of the job: MPI's under ``mpiexec``, virtual ones in ``run_threads``, else only this process."""
    return current_thread_communicator() or _process_world()


@lru_cache(maxsize=1)
def _process_world() -> MPICommunicator | ThreadCommunicator:
    keep_freed_memory()
    try:
        with StopFlag(but_defaults=True):  # Python cannot repeat an interrupted import
            join_mpi()
            from spmd_engine.comm.communicators.mpi import MPI, MPICommunicator

            if MPI.COMM_WORLD.size > 1:
                end_all_ranks_on_error(MPI.COMM_WORLD)
    except (ImportError, RuntimeError) as error:
        if launchers.is_launched():
            raise UsageError(
                f"started by an MPI launcher, but mpi4py cannot load an MPI library ({error}). Install one: "
                "pip install 'spmd_engine[mpich]', or load your cluster's MPI module; 'doctor' says more"
            ) from error
        return _open_solo_world()
    if MPI.COMM_WORLD.size == 1:
        return _open_solo_world(_recorded_progress() if launchers.is_launched() else None)
    comm = _open_world(MPICommunicator(MPI.COMM_WORLD, _recorded_progress()))
    leave_at_exit(lambda: Group(comm, "world", Ledger()).leave(), partial(_receive_side_messages, comm))
    return comm


def _recorded_progress() -> Progress:
    """The progress of a rank, whose activity other processes can read. Its file stays open: ranks may join later."""
    record = OwnMemory(SIZE)
    return Progress(Activity(record.map(), record.handle))


def _open_world(comm: MPICommunicator) -> MPICommunicator:
    """Let all ranks of a new world share memory and cores, and watch them. Collective."""
    hosts = gather_texts(comm, comm.node)
    ranks = [rank for rank, host in enumerate(hosts) if host == comm.node]
    mine = [sorted(os.sched_getaffinity(0)), quota_here(), comm.progress.activity.handle]
    on_node = [json.loads(text) for text in gather_texts(comm, json.dumps(mine), ranks)]
    cores = cores_of([(cores, quota) for cores, quota, _ in on_node])
    records = mapped([handle for *_, handle in on_node]) or [comm.progress.activity.memory]
    _share_cores(cores // len(ranks))
    comm.open_node(hosts, cores)
    comm.records = dict(zip(ranks if len(records) == len(ranks) else [comm.rank], records, strict=True))
    _start_watchdog(comm)
    return comm


def _open_solo_world(progress: Progress | None = None) -> ThreadCommunicator:
    """A world of this process only. Raises UsageError if a launcher started several but MPI sees only this one."""
    if (size := launchers.launcher_size()) > 1:
        raise UsageError(
            f"started as one of {size} processes by {launchers.launcher_name()}, but MPI sees only this one, and each "
            f"process would do all the work by itself: {launchers.MPI_MIXED}{launchers.NOT_MIXED}"
        )
    if (cores := cores_here()) < len(os.sched_getaffinity(0)):  # BLAS has started a thread for each core
        _share_cores(int(cores))
    return solo(progress)


def _start_watchdog(comm: MPICommunicator) -> None:
    """Start the watchdog, which reads the records of this node's ranks and requests those of other nodes."""
    from spmd_engine.runtime.other_nodes import MPI, OtherNodes

    records, messages, other_nodes = comm.records, comm.side_messages, None
    if messages is not None and len(records) < comm.size and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        other_nodes = OtherNodes(messages, comm.size, list(records))
    activity = comm.progress.activity
    activity.records = [Record(rank, memory) for rank, memory in records.items()]
    comm.stop_watching = Watchdog(activity, comm.rank, comm.size, other_nodes).stop
    atexit.register(comm.stop_watching)


# --- Worlds that grow


#: Where rank 0 of a running world meets rank 0 of another one, whose ranks join it: see ``merged``.
Port = Union["MPIPort", ThreadPort]


def open_port(comm: Communicator, name: str = "", timeout: float = TIMEOUT) -> Port:
    """A port at which rank 0 of another world can connect within ``timeout`` seconds; or, with the ``name`` of one, a
    connection to it. Call this on rank 0 of the world ``comm``. Raises UsageError if it cannot merge with others."""
    if isinstance(comm, ThreadCommunicator) and current_thread_communicator() is not None:
        return comm.open_port(name, timeout)
    if not launchers.is_launched():
        raise UsageError("MPI merges only jobs that mpiexec has started")
    from spmd_engine.comm.communicators.mpi import MPIPort

    return MPIPort(name, timeout)


def merged(comm: Communicator, port: Port | None, joins: bool) -> Communicator:
    """The world of all ranks of two worlds, first those that were there, then those that join, each in their order.

    ``comm``: this world, whose rank 0 has the ``port`` at which both have connected; ``joins``: whether it is the one
    that joins. Collective over both. The old worlds stay. End the use of the new one by ``part``, newest first.
    """
    if isinstance(comm, ThreadCommunicator) and current_thread_communicator() is not None:
        return comm.merged(joins, Progress() if joins else comm.progress)
    from spmd_engine.comm.communicators.mpi import MPI, MPICommunicator, MPIPort

    assert port is None or isinstance(port, MPIPort)
    own = comm._comm if isinstance(comm, MPICommunicator) else MPI.COMM_WORLD
    progress = _recorded_progress() if joins else comm.progress
    world = MPICommunicator(MPIPort.merge(own, port, joins), progress)
    if isinstance(comm, MPICommunicator) and not joins:
        comm.stop_watching()
    return _open_world(world)


def part(world: Communicator, before: Communicator) -> None:
    """End the use of a merged world; the world ``before`` it goes on. Collective."""
    Group(world, "world", Ledger()).barrier("parting")
    if isinstance(world, ThreadCommunicator):
        world.part()
        return
    from spmd_engine.comm.communicators.mpi import MPICommunicator

    assert isinstance(world, MPICommunicator)
    world.stop_watching()
    _receive_side_messages(world)
    world.part()
    if isinstance(before, MPICommunicator) and before.progress is world.progress:
        _start_watchdog(before)


def _receive_side_messages(comm: MPICommunicator) -> None:
    """Receive the remaining side messages to this rank, after all ranks have ended. Collective."""
    messages = comm.side_messages
    if messages is not None:
        sent = messages.close()
        messages.receive_rest(int(Group(comm, "world", Ledger()).reduce_scatter(sent, label="ending")[0]))


def _share_cores(threads: int) -> None:
    """Limit this rank to ``threads`` BLAS threads, unless the user has set a number."""
    if not any(name in os.environ for name in launchers.THREAD_VARIABLES):
        threadpool_limits(max(1, threads), user_api="blas")


def fail(message: str) -> None:
    """Print a user's mistake in one line, whether one rank or all ranks detected it, and leave the job.

    If all ranks call this function, each may then exit normally. If only this rank does, the job ends with code 2.
    """
    comm = _process_world() if _process_world.cache_info().currsize else None
    if comm is None or isinstance(comm, ThreadCommunicator):  # this process only
        if launchers.launcher_rank() == 0:  # before ranks have joined, all detect the same mistake
            sys.stderr.write(f"{message}\n")
            sys.stderr.flush()
        launchers.let_rank_zero_speak()
        return
    stay_at_exit()
    if prints_error(comm._comm):
        sys.stderr.write(f"{message}\n" if comm.rank == 0 else f"rank {comm.rank} of {comm.size}: {message}\n")
        sys.stderr.flush()
    world = Group(comm, "world", Ledger(), timeout=2.0)
    try:
        world.leave(message)
    except SpmdError:
        time.sleep(0.1)  # the launcher must forward the output before the job ends
        comm._comm.Abort(2)
    for other in set(range(comm.size)) - {comm.rank}:
        # All ranks have failed and sent this message. With messages in flight MPICH does not finalize properly: the
        # launcher then treats the first exit as a crash and kills the other ranks.
        comm._comm.Recv(bytearray(), other, FAILED)
    _receive_side_messages(comm)
