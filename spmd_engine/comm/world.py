"""The world of ranks this code runs in, and what a rank must set up once when it enters it."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from threadpoolctl import threadpool_limits

from spmd_engine.arrays.memory import keep_freed_memory
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.communicators.threads import current_thread_communicator, solo
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import Progress
from spmd_engine.comm.shared_memory.cores import cores_here, cores_of, quota_here
from spmd_engine.errors import SpmdError, UsageError
from spmd_engine.runtime.activity import SIZE, Activity, Memory
from spmd_engine.runtime.ending import FAILED, end_all_ranks_on_error, leave_at_exit, speaks, stay_at_exit
from spmd_engine.runtime.join import join_mpi
from spmd_engine.runtime.launchers import (
    THREAD_VARIABLES,
    is_launched,
    launcher_rank,
    launcher_size,
    let_rank_zero_speak,
)
from spmd_engine.runtime.records import Record
from spmd_engine.runtime.signals import StopFlag
from spmd_engine.runtime.watchdog import Watchdog


def world() -> Communicator:
    """All ranks of this program: MPI's under ``mpiexec``, virtual ones inside ``run``, else just this process."""
    return current_thread_communicator() or _process_world()


@lru_cache(maxsize=1)
def _process_world() -> Communicator:
    keep_freed_memory()
    try:
        with StopFlag(but_defaults=True):  # an import that was interrupted cannot be made again
            join_mpi()
            from spmd_engine.comm.communicators.mpi import MPI, MPICommunicator
            from spmd_engine.comm.shared_memory.node import OwnMemory, mapped

            if MPI.COMM_WORLD.size > 1:
                end_all_ranks_on_error(MPI.COMM_WORLD)
    except (ImportError, RuntimeError) as error:
        if is_launched():
            raise UsageError(
                f"started by an MPI launcher, but mpi4py cannot load an MPI library ({error}). Install one: "
                "pip install 'spmd_engine[mpich]', or load your cluster's MPI module"
            ) from error
        return _alone()
    if MPI.COMM_WORLD.size == 1:
        return _alone()
    record = OwnMemory(SIZE)
    comm = MPICommunicator(MPI.COMM_WORLD, Progress(Activity(record.map())))
    tell = partial(gather_json, Group(comm, "world", Ledger()), label="joining")
    hosts, cores, told = _hosts_and_cores(comm, record.told, tell)
    ranks = [rank for rank, host in enumerate(hosts) if host == comm.node]
    records = mapped(told) or [comm.progress.activity.memory]
    _share_cores(cores // len(ranks))
    comm.open_node(hosts, cores, tell)
    record.close()  # all have opened it: they met since
    _watch(comm, dict(zip(ranks if len(records) == len(ranks) else [comm.rank], records, strict=True)))
    leave_at_exit(lambda: Group(comm, "world", Ledger()).leave(), partial(_settle, comm))
    return comm


def _alone() -> Communicator:
    """Just this process. Raises UsageError if it, of which MPI says that it is alone, was started with others."""
    if (size := launcher_size()) > 1:
        raise UsageError(
            f"started as one of {size} processes, but MPI sees this one alone: the launcher is not of this MPI "
            "library, and each process would do all the work by itself. Start it by the mpiexec of this environment; "
            "or by srun: 'srun --mpi=pmi2' with MPICH, or with an MPI that was built for it"
        )
    if (cores := cores_here()) < len(os.sched_getaffinity(0)):  # for as many BLAS has made threads
        _share_cores(int(cores))
    return solo()


def _watch(comm: Communicator, records: Mapping[int, Memory]) -> None:
    """Start a watchdog, which sees these ranks' records, and asks others for theirs."""
    from spmd_engine.runtime.other_nodes import MPI, OtherNodes

    messages, elsewhere = comm.side_messages, None
    if messages is not None and len(records) < comm.size and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        elsewhere = OtherNodes(messages, comm.size, list(records))
    seen = [Record(rank, memory) for rank, memory in records.items()]
    watchdog = Watchdog(comm.progress.activity, seen, comm.rank, comm.size, elsewhere)
    atexit.register(watchdog.stop)


def _settle(comm: Communicator) -> None:
    """Receive all messages beside calls that were sent to this rank, after all have come to their end. Collective."""
    messages = comm.side_messages
    if messages is not None:
        sent = messages.close()
        messages.receive_rest(int(Group(comm, "world", Ledger()).reduce_scatter(sent, label="ending")[0]))


def _hosts_and_cores(
    comm: Communicator, record: str, tell: Callable[[Any], list[Any]]
) -> tuple[list[str], int, list[str]]:
    """The host of each rank; how many cores the ranks of this one have between them; and where their records are."""
    everyone = tell([comm.node, sorted(os.sched_getaffinity(0)), quota_here(), record])
    here = [told for host, *told in everyone if host == comm.node]
    cores = cores_of([(cores, quota) for cores, quota, _ in here])
    return [host for host, *_ in everyone], cores, [where for *_, where in here]


def _share_cores(threads: int) -> None:
    """Give this rank that many BLAS threads, unless the user has set a number."""
    if not any(name in os.environ for name in THREAD_VARIABLES):
        threadpool_limits(max(1, threads), user_api="blas")


def fail(message: str) -> None:
    """Say a user's mistake in one line, whether one rank found it or all, and leave the world.

    If all ranks come here, each may then exit as it likes. If this one is alone, the job ends with code 2.
    """
    comm = _process_world() if _process_world.cache_info().currsize else None
    if comm is None or comm.size == 1:
        if launcher_rank() == 0:  # before the world is known, every rank finds the same
            sys.stderr.write(f"{message}\n")
            sys.stderr.flush()
        let_rank_zero_speak()
        return
    stay_at_exit()
    if speaks(comm._comm):
        sys.stderr.write(f"{message}\n" if comm.rank == 0 else f"rank {comm.rank} of {comm.size}: {message}\n")
        sys.stderr.flush()
    world = Group(comm, "world", Ledger(), timeout=2.0)
    try:
        world.leave(message)
    except SpmdError:
        time.sleep(0.1)  # the launcher passes on what was printed before it hears of the end
        comm._comm.Abort(2)
    for other in set(range(comm.size)) - {comm.rank}:
        # All have come here, and so have told. With messages left under way MPICH does not end in good order: the
        # launcher then takes the first exit for a crash, and kills the others.
        comm._comm.Recv(bytearray(), other, FAILED)
    _settle(comm)
