"""How ranks end together: in good order all meet once more, and in an error one of them says why and ends the job."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from spmd_engine.errors import RankAborted, SpmdError
from spmd_engine.runtime.join import join_mpi
from spmd_engine.runtime.launchers import is_launched, launcher_rank
from spmd_engine.runtime.signals import ENDING, exit_code, raise_interrupted

JOIN = 10  #: seconds within which other ranks should come, too, when one joins MPI only to leave
FINALIZE = 120  #: seconds that the end of MPI may take after all ranks have come to the end of their programs
FAILED = 32767  #: the tag by which ranks hear that one has failed, the largest that every MPI allows


def leave_at_exit(leave: Callable[[], None], settle: Callable[[], None]) -> None:
    """When this program ends in good order, ``leave`` meets the others, and raises SpmdError if they are elsewhere.

    Then all ranks ``settle``: they receive what is still on its way to them.
    """
    atexit.register(_leave, leave, settle)


def stay_at_exit() -> None:
    """Meet nobody: this end is not in good order."""
    atexit.unregister(_leave)


def _leave(leave: Callable[[], None], settle: Callable[[], None]) -> None:
    """Meet once more before MPI ends, so that a rank still inside a collective is told instead of hanging."""
    try:
        with raise_interrupted():
            leave()
    except (SpmdError, KeyboardInterrupt) as error:
        # atexit would print it and continue to MPI_Finalize, which would hang.
        sys.excepthook(type(error), error, error.__traceback__)
    # All have come to their end. Should MPI_Finalize hang (a rank is stopped there, a link is down), no Python runs any
    # more that could tell: the system then ends this process, and the launcher says so and ends the job. Whoever asks
    # the job to end now gets what was asked for, without the exit code of a job that was killed.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(FINALIZE)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    settle()


def end_all_ranks_on_error(comm) -> None:
    """An uncaught exception on one rank ends the job: the others would wait for it for ever.

    Of ranks that fail together (a mismatch is the same error everywhere) only the lowest speaks, so that
    there is one traceback. ``comm``: MPI's, of all ranks.
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


def _end_job(comm, text: str, code: int, patience: float = 0.3) -> None:
    """End all ranks with exit code ``code``; of ranks that come here together, only the lowest prints its text."""
    stay_at_exit()  # Abort may return: then this must not look like an end in good order
    if speaks(comm, patience):
        sys.stderr.write(text)
        sys.stderr.flush()
        sys.stdout.flush()
        time.sleep(0.1)  # the launcher passes on what was printed before it hears of the end
    else:
        time.sleep(5)  # the rank that speaks ends the job meanwhile
    comm.Abort(code)
    time.sleep(5)  # Abort may return: the launcher ends this process, and there is no more to say
    os._exit(code)


def speaks(comm, patience: float = 0.3) -> bool:
    """Tell all others that this rank failed; whether no lower rank says so in the next ``patience`` seconds."""
    for to in set(range(comm.size)) - {comm.rank}:
        comm.Isend(b"", to, FAILED)
    deadline = time.monotonic() + patience
    while comm.rank > 0 and time.monotonic() < deadline:
        if any(comm.Iprobe(lower, FAILED) for lower in range(comm.rank)):
            return False
        time.sleep(0.01)
    return True
