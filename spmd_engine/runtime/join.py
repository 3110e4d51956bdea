"""Joining MPI: room in shared memory, files left there by dead jobs, and a time limit for missing ranks."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from spmd_engine.errors import UsageError
from spmd_engine.runtime import launchers

FOLDER = Path("/dev/shm")
PATTERNS = ("mpich_shm_*", "sm_segment.*")  # files of MPICH and Open MPI; they stay after a rank is killed
_MADE_BY = re.compile(r"mpich_shm_([0-9a-f]{1,8})_")  # the number of the process that has made a file of MPICH
#: Bytes of MPICH's file, measured with 5.0.2 on 2 to 64 ranks. MPICH writes all of it at the start; without room the
#: system ends it with SIGBUS.
MPICH_BYTES_PER_RANK, MPICH_BYTES = 1_057_344, 4096


def files_in_shared_memory() -> set[Path]:
    """Files of MPI libraries in /dev/shm that belong to this user."""
    files = set()
    for path in (path for pattern in PATTERNS for path in FOLDER.glob(pattern)):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                files.add(path)
    return files


def remove_unused(files: Iterable[Path]) -> None:
    """Remove the files that no process has open or mapped.

    A running job keeps its file mapped. A job in another container, whose processes are invisible, may lose its file's
    name: it needs that only while its ranks start.
    """
    files = set(files)
    # First the processes that have made MPICH's files, by their names: those of running jobs hold them.
    files -= held_files(int(made[1], 16) for path in files if (made := _MADE_BY.match(path.name)))
    for path in files - held_files(_processes()) if files else ():
        with suppress(OSError):
            path.unlink()


def check_room(ranks: int, made: Callable[[], Iterable[Path]] = tuple) -> None:
    """Raise UsageError if /dev/shm has no room for MPICH's file for this many ranks of this node.

    ``made`` returns files that this job has made already, and is called only without room for more: the first rank of
    a node makes one after its own check.
    """
    needed = MPICH_BYTES + MPICH_BYTES_PER_RANK * ranks
    with suppress(FileNotFoundError):
        room = os.statvfs(FOLDER)
        free = room.f_bavail * room.f_frsize
        if free < needed:
            free += sum(path.stat().st_size for path in made())
        if room.f_blocks and free < needed:  # no blocks: no limit
            raise UsageError(
                f"{FOLDER} has {free / 2**20:.2f} MiB free, and MPICH needs {needed / 2**20:.2f} for {ranks} rank(s): "
                "remove files there, or enlarge it "
                f"(in a container: --shm-size; else: mount -o remount,size=1g {FOLDER}); 'doctor' says more"
            )


def siblings() -> list[int]:
    """The child processes of this one's parent: ranks of the same job on this node."""
    parent = os.getppid()
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def held_files(processes: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that these processes have open or mapped, as far as this user can see."""
    held = set()
    for process in processes:
        with suppress(OSError):
            # In this order: a file that is being made is open until it is mapped.
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    held.add(os.readlink(descriptor))
            lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
            held |= {line[line.index("/") :] for line in lines if "/" in line}
    return {Path(path) for path in held if path.startswith(f"{FOLDER}/")}


def _processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


# --- MPI_Init


NOTE_AFTER = 30.0  #: seconds of waiting after which a note is printed
MOST = 600.0  #: seconds of waiting after which a rank ends its job
LEAST_FILE = 4 << 20  #: bytes; MPI and checkpoints need files of this size
#: Open files of a rank, measured: 35, of which MPI has 20, and 4 more for each other rank of its node.
LEAST_OPEN, OPEN_PER_RANK = 24, 8
LEAST_ADDRESSES = 1 << 30  #: bytes; with 0.8 GB, a thread for a save could not be started

_USUAL = {"initialize": True, "threads": True, "thread_level": "multiple", "finalize": None, "errors": "exception"}
_NOT_YET = False, True  # rc.initialize and rc.finalize before, or after an interrupted, join


def join_mpi() -> None:
    """Initialize MPI as mpi4py does at its import, but with a time limit; nothing if it is initialized already.

    If a rank ends before it has joined (a package is missing on its node, it is out of memory), all others wait in
    MPI_Init, and MPICH's launcher does not end the job. mpi4py holds the GIL meanwhile, so that no thread could
    report it; a call by ctypes releases it. The first rank of a node removes files that dead jobs of this user have
    left in shared memory. Raises UsageError if there is no room for the files of MPI, or if the launcher belongs to
    another MPI library.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules and all(getattr(mpi4py.rc, name) == _USUAL[name] for name in _USUAL):
        mpi4py.rc.initialize, mpi4py.rc.finalize = _NOT_YET
    from mpi4py import MPI  # which initializes MPI, if the program's rc says so

    if MPI.Is_initialized() or (mpi4py.rc.initialize, mpi4py.rc.finalize) != _NOT_YET:
        return
    check_limits(launchers.local_size())
    if launchers.local_rank() == 0:
        remove_unused(files_in_shared_memory())
    if MPI.Get_library_version().startswith("MPICH"):
        if "PMIX_NAMESPACE" in os.environ and "pmix" not in Path("/proc/self/maps").read_text():
            raise UsageError(  # MPICH would end the process
                f"started by {launchers.launcher_name()}, which offers PMIx, but mpi4py loads an MPICH without it: "
                f"{launchers.MPI_MIXED}{launchers.NOT_MIXED}"
            )
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
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py turns error codes into exceptions


def check_limits(ranks: int) -> None:
    """Raise UsageError if a limit of this process is too low for one of ``ranks`` ranks of this node."""
    least = {
        resource.RLIMIT_FSIZE: (LEAST_FILE, "files may have {} bytes here (ulimit -f)"),
        resource.RLIMIT_NOFILE: (LEAST_OPEN + OPEN_PER_RANK * ranks, "a process may open {} files here (ulimit -n)"),
        resource.RLIMIT_AS: (LEAST_ADDRESSES, "a process may have {} bytes of addresses here (ulimit -v)"),
    }
    for limit, (needed, what) in least.items():
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY and most < needed:
            raise UsageError(f"{what.format(most)}, too few for MPI and for checkpoints: raise it to {needed} at least")


def _check_room() -> None:
    """Raise UsageError on all ranks of a node without room; with several nodes, end the job."""
    rank, ranks = launchers.local_rank(), launchers.local_size()
    try:
        check_room(ranks, lambda: held_files(siblings()) & files_in_shared_memory() if rank else ())
    except UsageError as error:
        if ranks < launchers.launcher_size():  # ranks of nodes with room would wait for these ranks
            if rank == 0:
                sys.stderr.write(f"spmd_engine: {os.uname().nodename}: {error}\n")
                sys.stderr.flush()
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGALRM)
        raise


def _watch(joined: threading.Event) -> None:
    """Print that ranks are missing, on ranks 0 and 1, since one of them may be missing. Later, end the process.

    A signal ends it, because some launchers ignore a rank's exit code before MPI_Init.
    """
    if joined.wait(NOTE_AFTER):
        return
    if launchers.launcher_rank() < 2:
        sys.stderr.write(
            f"rank {launchers.launcher_rank()} has waited {NOTE_AFTER:.0f} s for all ranks to join MPI. At least one "
            f"is missing or has ended: see its output. The job ends after {MOST:.0f} s\n"
        )
        sys.stderr.flush()
    if not joined.wait(MOST - NOTE_AFTER):
        os.kill(os.getpid(), signal.SIGALRM)
