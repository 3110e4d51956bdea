"""The world of ranks this code runs in, and what a rank must set up once when it enters it."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from threadpoolctl import threadpool_limits

from spmd_engine.arrays.memory import keep_freed_memory
from spmd_engine.comm.agreement import gather_json
from spmd_engine.comm.communicator import Communicator
from spmd_engine.comm.group import Group
from spmd_engine.comm.join import join_mpi
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import Progress
from spmd_engine.comm.threads import current_thread_communicator, solo
from spmd_engine.errors import RankAborted, SpmdError, UsageError
from spmd_engine.launchers import THREAD_VARIABLES, is_launched, launcher_rank, launcher_size, let_rank_zero_speak
from spmd_engine.node.cores import cores_here, cores_of, quota_here
from spmd_engine.signals import exit_code
from spmd_engine.watchdog.activity import SIZE, Activity, Memory
from spmd_engine.watchdog.records import Record
from spmd_engine.watchdog.watchdog import Watchdog

JOIN = 10  #: seconds within which other ranks should come, too, when one joins MPI only to leave
FINALIZE = 120  #: seconds that the end of MPI may take after all ranks have come to the end of their programs
_FAILED = 32767  # the largest tag that every MPI allows


def world() -> Communicator:
    """All ranks of this program: MPI's under ``mpiexec``, virtual ones inside ``run``, else just this process."""
    return current_thread_communicator() or _process_world()


@lru_cache(maxsize=1)
def _process_world() -> Communicator:
    keep_freed_memory()
    try:
        join_mpi()
        from spmd_engine.comm.mpi import MPI, MPICommunicator
        from spmd_engine.node.node import OwnMemory, mapped
    except (ImportError, RuntimeError) as error:
        if is_launched():
            raise UsageError(
                f"started by an MPI launcher, but mpi4py cannot load an MPI library ({error}). Install one: "
                "pip install 'spmd_engine[mpich]', or load your cluster's MPI module"
            ) from error
        return _alone()
    if MPI.COMM_WORLD.size == 1:
        return _alone()
    _end_all_ranks_on_error(MPI.COMM_WORLD)
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
    atexit.register(_leave, comm)
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
    from spmd_engine.watchdog.other_nodes import MPI, OtherNodes

    several = len(records) < comm.size and MPI.Query_thread() == MPI.THREAD_MULTIPLE
    seen = [Record(rank, memory) for rank, memory in records.items()]
    elsewhere = OtherNodes(MPI.COMM_WORLD, list(records)) if several else None
    watchdog = Watchdog(comm.progress.activity, seen, comm.rank, comm.size, elsewhere)
    atexit.register(watchdog.stop)


def _leave(comm: Communicator) -> None:
    """Meet once more before MPI ends, so that a rank still inside a collective is told instead of hanging."""
    try:
        Group(comm, "world", Ledger()).leave()
    except SpmdError:
        sys.excepthook(*sys.exc_info())  # atexit would print it and go on into MPI_Finalize, which hangs
    # All have come to their end. Should MPI_Finalize hang (a rank is stopped there, a link is down), no Python runs any
    # more that could tell: the system then ends this process, and the launcher says so and ends the job.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(FINALIZE)


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


def _end_all_ranks_on_error(comm) -> None:
    """An uncaught exception on one rank ends the job: the others would wait for it for ever.

    Of ranks that fail together (a mismatch is the same error everywhere) only the lowest speaks, so that
    there is one traceback.
    """

    def hook(kind, error, trace):
        if issubclass(kind, RankAborted):
            time.sleep(5)  # the rank that failed says why, and ends the job
        who = f"rank {comm.rank} of {comm.size}"
        if issubclass(kind, KeyboardInterrupt):
            _end_job(comm, f"{who}: {str(error) or 'interrupted'}; it ends the job\n", exit_code(error), patience=1.0)
        text = "".join(traceback.format_exception(kind, error, trace))
        _end_job(comm, f"{who} failed and ends the job:\n{text}", 1)

    sys.excepthook = hook


def _end_job(comm, text: str, code: int, patience: float = 0.3) -> None:
    """End all ranks with exit code ``code``; of ranks that come here together, only the lowest prints its text."""
    atexit.unregister(_leave)  # Abort may return: then this must not look like an end in good order
    if _speaks(comm, patience):
        sys.stderr.write(text)
        sys.stderr.flush()
        sys.stdout.flush()
        time.sleep(0.1)  # the launcher passes on what was printed before it hears of the end
    else:
        time.sleep(5)  # the rank that speaks ends the job meanwhile
    comm.Abort(code)
    time.sleep(5)  # Abort may return: the launcher ends this process, and there is no more to say
    os._exit(code)


def end_at_once(message: str, code: int) -> None:
    """Say why in one line and end the program, all its ranks, without waiting for any of them."""
    comm = None
    if is_launched():
        # A rank that leaves before it has joined MPI has the others wait for it there for ever. So it joins; should
        # they never come, the alarm ends this process, and the launcher then the job.
        signal.alarm(JOIN)
        with suppress(ImportError, RuntimeError):
            join_mpi()
            from mpi4py import MPI

            comm = MPI.COMM_WORLD if not MPI.Is_finalized() else None
        signal.alarm(0)
    if comm is None or comm.size == 1:
        if launcher_rank() == 0:
            sys.stderr.write(f"{message}\n")
        sys.exit(code)
    who = f"rank {comm.rank} of {comm.size}: " if comm.rank else ""
    _end_job(comm, f"{who}{message}\n", code, patience=1.0)


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
    atexit.unregister(_leave)
    if _speaks(comm._comm):
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
        comm._comm.Recv(bytearray(), other, _FAILED)


def _speaks(comm, patience: float = 0.3) -> bool:
    """Tell all others that this rank failed; whether no lower rank says so in the next ``patience`` seconds."""
    for to in set(range(comm.size)) - {comm.rank}:
        comm.Isend(b"", to, _FAILED)
    deadline = time.monotonic() + patience
    while comm.rank > 0 and time.monotonic() < deadline:
        if any(comm.Iprobe(lower, _FAILED) for lower in range(comm.rank)):
            return False
        time.sleep(0.01)
    return True
