"""Joining MPI: where ranks wait for each other for the first time, before any of them can tell another that it ends."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time

from spmd_engine.errors import UsageError
from spmd_engine.runtime.launchers import launcher_rank, launcher_size, local_rank, local_size
from spmd_engine.runtime.leftover_files import check_room, files_in_shared_memory, held_files, remove_unused, siblings

TOLD = 30.0  #: seconds of waiting after which it is told
MOST = 600.0  #: seconds of waiting after which a rank ends its job
LEAST_FILE = 4 << 20  #: bytes: with smaller files neither MPI nor checkpoints can do

_USUAL = {"initialize": True, "threads": True, "thread_level": "multiple", "finalize": None, "errors": "exception"}
_NOT_YET = False, True  # rc.initialize and rc.finalize of one who is about to join, or was interrupted in it


def join_mpi() -> None:
    """Initialize MPI as mpi4py does when it is imported, but not in silence; nothing if somebody has done so.

    A rank that ends before it has joined (a package is missing on its node, it is out of memory) has all others wait
    inside of MPI_Init, and MPICH's launcher thinks nothing of it. mpi4py keeps Python's lock meanwhile, so that no
    thread could tell; a call by ctypes does not. The first rank of a node removes what dead jobs of this user have left
    in shared memory. Raises UsageError where MPI would find no room for its own.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules and all(getattr(mpi4py.rc, name) == _USUAL[name] for name in _USUAL):
        mpi4py.rc.initialize, mpi4py.rc.finalize = _NOT_YET
    from mpi4py import MPI  # which initializes MPI, if the program has it so

    if MPI.Is_initialized() or (mpi4py.rc.initialize, mpi4py.rc.finalize) != _NOT_YET:
        return
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and most < LEAST_FILE:
        raise UsageError(f"files may have {most} bytes here (ulimit -f), too few for MPI and for checkpoints: raise it")
    if local_rank() == 0:
        remove_unused(files_in_shared_memory())
    if MPI.Get_library_version().startswith("MPICH"):
        _check_room()
    joined = threading.Event()
    threading.Thread(target=_watch, args=(joined,), name="joining", daemon=True).start()
    try:
        library, provided = ctypes.CDLL(MPI.__file__), ctypes.c_int()
        error = library.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
    finally:
        joined.set()
    if error:
        raise RuntimeError(f"MPI_Init_thread returned {error}")
    for comm in MPI.COMM_WORLD, MPI.COMM_SELF:
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # of which mpi4py makes exceptions


def _check_room() -> None:
    """Raise UsageError on all ranks of a node that has no room; where there are other nodes, end the job."""
    try:
        made = held_files(siblings()) & files_in_shared_memory() if local_rank() else ()
        check_room(local_size(), made)
    except UsageError as error:
        if local_size() < launcher_size():  # others may have room: they would wait for these ranks
            if local_rank() == 0:
                sys.stderr.write(f"spmd_engine: {os.uname().nodename}: {error}\n")
                sys.stderr.flush()
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGALRM)
        raise


def _watch(joined: threading.Event) -> None:
    """Say that others do not come, on one or two ranks: who does not come may be the first. Then end the process.

    By a signal, since a launcher that does not mind a rank's exit code ends its job for that.
    """
    if joined.wait(TOLD):
        return
    if launcher_rank() < 2:
        sys.stderr.write(
            f"rank {launcher_rank()} has waited {TOLD:.0f} s for all ranks to join MPI. One has not come so far, or "
            f"has ended before: see what it said. The job ends after {MOST:.0f} s\n"
        )
        sys.stderr.flush()
    if not joined.wait(MOST - TOLD):
        os.kill(os.getpid(), signal.SIGALRM)
