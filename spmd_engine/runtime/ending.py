"""How ranks end together: in a collective if all succeed; after an error, one of them prints it and ends the job."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from spmd_engine.errors import CommunicationTimeout, RankAborted, ReplicasDifferError, SpmdError, UsageError
from spmd_engine.runtime.join import join_mpi
from spmd_engine.runtime.launchers import CLEAR_BELOW, is_launched, launcher_rank, terminal
from spmd_engine.runtime.signals import ENDING, exit_code, raise_interrupted

FINALIZE = 120  #: seconds that MPI_Finalize may take after all ranks have ended their programs
FAILED = 32767  #: the tag of messages that a rank has failed, the largest that every MPI allows


def leave_at_exit(leave: Callable[[], None], settle: Callable[[], None]) -> None:
    """When this program ends without an error, call ``leave``, a collective, which raises SpmdError if ranks differ.

    Then all ranks ``settle``: they receive the messages that are still in flight.
    """
    atexit.register(_leave, leave, settle)


def stay_at_exit() -> None:
    """Do not call ``leave``: this program ends with an error."""
    atexit.unregister(_leave)


def _leave(leave: Callable[[], None], settle: Callable[[], None]) -> None:
    """A last collective before MPI ends: a rank that is still inside another one gets an error instead of a hang."""
    try:
        with raise_interrupted():
            leave()
    except (SpmdError, KeyboardInterrupt) as error:
        if isinstance(error, SpmdError):
            time.sleep(5)  # a rank that was in another call has the same error, and shows where it is
        # atexit would print it and continue to MPI_Finalize, which would hang.
        sys.excepthook(type(error), error, error.__traceback__)
    # All ranks have ended their programs. If MPI_Finalize hangs (a rank is stopped, a link is down), no Python code can
    # report it: the alarm ends this process, and the launcher the job. Signals that end the job are ignored now, so
    # that its exit code is not that of a killed job.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(FINALIZE)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    settle()


def end_all_ranks_on_error(comm) -> None:
    """End the job after an uncaught exception on one rank: the others would wait for it forever.

    If several ranks fail together (a mismatch is the same error on all), only the lowest prints its traceback.
    ``comm``: MPI's communicator of all ranks.
    """

    def hook(kind, error, trace):
        if issubclass(kind, RankAborted):
            time.sleep(5)  # the rank that failed prints its error and ends the job
        rank = f"rank {comm.rank} of {comm.size}"
        if issubclass(kind, KeyboardInterrupt):
            _end_job(comm, f"{rank}: {str(error) or 'interrupted'}; it ends the job\n", exit_code(error), patience=1.0)
        lines = _without_own_frames if issubclass(kind, CommunicationTimeout) else traceback.format_exception
        text = "".join(lines(error))
        if issubclass(kind, (CommunicationTimeout, ReplicasDifferError)):  # perhaps nodes or links are the cause
            text += f"'mpiexec -n {comm.size} python -m spmd_engine doctor' examines ranks, nodes and links\n"
        _end_job(comm, f"{rank} failed and ends the job:\n{text}", 1)

    sys.excepthook = hook


def _without_own_frames(error: BaseException) -> list[str]:
    """The lines of an error, which tells all itself, with the frames of the user's program alone."""
    report = traceback.TracebackException.from_exception(error)
    others = [frame for frame in report.stack if not any(folder in frame.filename for folder in _LIBRARIES)]
    report.stack = traceback.StackSummary.from_list(others) if others else None  # type: ignore[assignment]
    return [*report.format(chain=False)]


#: In the paths of this package, of its command line's library, and of modules without a file.
_LIBRARIES = (os.path.dirname(os.path.dirname(__file__)) + os.sep, f"{os.sep}click{os.sep}", "<frozen")


def end_at_once(message: str, code: int) -> None:
    """Print the message and end all ranks of the program, without waiting for any of them."""
    comm = None
    if is_launched():
        # If a rank exits before it has joined MPI, the others wait for it in MPI_Init forever. So it joins, and waits
        # for those that still start as long as any rank does: an end before that would have another code.
        with suppress(ImportError, RuntimeError, UsageError):
            join_mpi()
            from mpi4py import MPI

            comm = MPI.COMM_WORLD if not MPI.Is_finalized() else None
    if comm is None or comm.size == 1:
        if launcher_rank() == 0:
            with suppress(OSError):
                sys.stderr.write(f"{message}\n")
        sys.exit(code)
    rank = f"rank {comm.rank} of {comm.size}: " if comm.rank else ""
    _end_job(comm, f"{rank}{message}\n", code, patience=1.0)


def end_job_from_thread(message: str) -> None:
    """Print the message and end all ranks of this MPI job with code 1, from any thread, whatever the others do."""
    from mpi4py import MPI

    _end_job(MPI.COMM_WORLD, f"{message}\n", 1)


def _end_job(comm, text: str, code: int, patience: float = 0.3) -> None:
    """End all ranks with exit code ``code``; of ranks that call this together, only the lowest prints its text."""
    stay_at_exit()  # Abort may return: the program must then not call ``leave``
    if prints_error(comm, patience):
        with suppress(OSError):  # whose output is closed ends the other ranks all the same
            sys.stderr.write((CLEAR_BELOW if terminal() else "") + text)
            sys.stderr.flush()
            sys.stdout.flush()
        time.sleep(0.1)  # the launcher forwards the output before it sees the exit
    else:
        time.sleep(5)  # the rank that prints ends the job meanwhile
    comm.Abort(code)
    time.sleep(5)  # Abort may return, and the launcher ends this process
    os._exit(code)


def prints_error(comm, patience: float = 0.3) -> bool:
    """Tell all ranks that this one failed; return whether no lower rank tells the same in ``patience`` seconds."""
    for to in set(range(comm.size)) - {comm.rank}:
        comm.Isend(b"", to, FAILED)
    deadline = time.monotonic() + patience
    while comm.rank > 0 and time.monotonic() < deadline:
        if any(comm.Iprobe(lower, FAILED) for lower in range(comm.rank)):
            return False
        time.sleep(0.01)
    return True
