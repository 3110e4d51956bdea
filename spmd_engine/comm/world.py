"""The ranks of this job, and the setup of a rank that joins them."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from threadpoolctl import threadpool_limits

from spmd_engine.arrays.memory import keep_freed_memory
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.communicators.threads import ThreadCommunicator, current_thread_communicator, solo
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import Progress
from spmd_engine.comm.shared_memory.cores import cores_here, cores_of, quota_here
from spmd_engine.errors import SpmdError, UsageError
from spmd_engine.runtime.activity import SIZE, Activity, Memory, Record
from spmd_engine.runtime.ending import FAILED, end_all_ranks_on_error, leave_at_exit, prints_error, stay_at_exit
from spmd_engine.runtime.join import join_mpi
from spmd_engine.runtime.launchers import (
    MPI_MIXED,
    NOT_MIXED,
    THREAD_VARIABLES,
    is_launched,
    launcher_name,
    launcher_rank,
    launcher_size,
    let_rank_zero_speak,
)
from spmd_engine.runtime.signals import StopFlag
from spmd_engine.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from spmd_engine.comm.communicators.mpi import MPICommunicator


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
            from spmd_engine.comm.shared_memory.node import OwnMemory, mapped

            if MPI.COMM_WORLD.size > 1:
                end_all_ranks_on_error(MPI.COMM_WORLD)
    except (ImportError, RuntimeError) as error:
        if is_launched():
            raise UsageError(
                f"started by an MPI launcher, but mpi4py cannot load an MPI library ({error}). Install one: "
                "pip install 'spmd_engine[mpich]', or load your cluster's MPI module; 'doctor' says more"
            ) from error
        return _open_solo_world()
    if MPI.COMM_WORLD.size == 1:
        return _open_solo_world()
    record = OwnMemory(SIZE)
    comm = MPICommunicator(MPI.COMM_WORLD, Progress(Activity(record.map())))
    gather = partial(gather_json, Group(comm, "world", Ledger()), label="joining")
    hosts, cores, handles = _hosts_and_cores(comm, record.handle, gather)
    ranks = [rank for rank, host in enumerate(hosts) if host == comm.node]
    records = mapped(handles) or [comm.progress.activity.memory]
    _share_cores(cores // len(ranks))
    comm.open_node(hosts, cores, gather)
    record.close()  # all ranks have opened it, as ``open_node`` has communicated since
    _start_watchdog(comm, dict(zip(ranks if len(records) == len(ranks) else [comm.rank], records, strict=True)))
    leave_at_exit(lambda: Group(comm, "world", Ledger()).leave(), partial(_receive_side_messages, comm))
    return comm


def _open_solo_world() -> ThreadCommunicator:
    """A world of this process only. Raises UsageError if a launcher started several but MPI sees only this one."""
    if (size := launcher_size()) > 1:
        raise UsageError(
            f"started as one of {size} processes by {launcher_name()}, but MPI sees only this one, and each process "
            f"would do all the work by itself: {MPI_MIXED}{NOT_MIXED}"
        )
    if (cores := cores_here()) < len(os.sched_getaffinity(0)):  # BLAS has started a thread for each core
        _share_cores(int(cores))
    return solo()


def _start_watchdog(comm: MPICommunicator, records: Mapping[int, Memory]) -> None:
    """Start the watchdog, which reads these ranks' records and requests those of other nodes."""
    from spmd_engine.runtime.other_nodes import MPI, OtherNodes

    messages, other_nodes = comm.side_messages, None
    if messages is not None and len(records) < comm.size and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        other_nodes = OtherNodes(messages, comm.size, list(records))
    activity = comm.progress.activity
    activity.records = [Record(rank, memory) for rank, memory in records.items()]
    watchdog = Watchdog(activity, activity.records, comm.rank, comm.size, other_nodes)
    atexit.register(watchdog.stop)


def _receive_side_messages(comm: MPICommunicator) -> None:
    """Receive the remaining side messages to this rank, after all ranks have ended. Collective."""
    messages = comm.side_messages
    if messages is not None:
        sent = messages.close()
        messages.receive_rest(int(Group(comm, "world", Ledger()).reduce_scatter(sent, label="ending")[0]))


def _hosts_and_cores(
    comm: Communicator, record: str, gather: Callable[[Any], list[Any]]
) -> tuple[list[str], int, list[str]]:
    """The host of each rank, the number of cores of this node's ranks together, and the handles of their records."""
    all_ranks = gather([comm.node, sorted(os.sched_getaffinity(0)), quota_here(), record])
    on_node = [fields for host, *fields in all_ranks if host == comm.node]
    cores = cores_of([(cores, quota) for cores, quota, _ in on_node])
    return [host for host, *_ in all_ranks], cores, [handle for *_, handle in on_node]


def _share_cores(threads: int) -> None:
    """Limit this rank to ``threads`` BLAS threads, unless the user has set a number."""
    if not any(name in os.environ for name in THREAD_VARIABLES):
        threadpool_limits(max(1, threads), user_api="blas")


def fail(message: str) -> None:
    """Print a user's mistake in one line, whether one rank or all ranks detected it, and leave the job.

    If all ranks call this function, each may then exit normally. If only this rank does, the job ends with code 2.
    """
    comm = _process_world() if _process_world.cache_info().currsize else None
    if comm is None or isinstance(comm, ThreadCommunicator):  # this process only
        if launcher_rank() == 0:  # before ranks have joined, all detect the same mistake
            sys.stderr.write(f"{message}\n")
            sys.stderr.flush()
        let_rank_zero_speak()
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
