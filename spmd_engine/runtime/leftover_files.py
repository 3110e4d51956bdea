"""Files of MPI libraries in /dev/shm: what dead jobs have left there, and whether there is room for another job's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from spmd_engine.errors import UsageError

FOLDER = Path("/dev/shm")
PATTERNS = ("mpich_shm_*", "sm_segment.*")  # of MPICH and Open MPI: they stay when a rank is killed
#: Bytes of MPICH's file, measured with 5.0.2 on 2 to 64 ranks. It writes to all of them when it starts, and where there
#: is no room the system ends it with SIGBUS.
MPICH_BYTES_PER_RANK, MPICH_BYTES = 1_057_344, 4096


def files_in_shared_memory() -> set[Path]:
    """This user's."""
    found = set()
    for path in (path for pattern in PATTERNS for path in FOLDER.glob(pattern)):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def remove_unused(files: Iterable[Path]) -> None:
    """Remove those of the files that no process has open or mapped.

    A job keeps its file mapped from when it makes it. Where processes cannot be seen (of another container) the file of
    a job that runs may go, too: it does without the name, which is of use only while its ranks start.
    """
    if files := list(files):
        held = held_files(_processes())
        for path in files:
            if path not in held:
                with suppress(OSError):
                    path.unlink()


def check_room(ranks: int, made: Iterable[Path] = ()) -> None:
    """Raise UsageError where /dev/shm has no room for MPICH's file for so many ranks of this node.

    ``made``: files that this job has made already; the first rank of a node does so once it has looked for room.
    """
    needed = MPICH_BYTES + MPICH_BYTES_PER_RANK * ranks
    with suppress(FileNotFoundError):
        room = os.statvfs(FOLDER)
        free = room.f_bavail * room.f_frsize + sum(path.stat().st_size for path in made)
        if room.f_blocks and free < needed:  # of no blocks: without a limit
            raise UsageError(
                f"{FOLDER} has {free / 2**20:.2f} MiB free, and MPICH needs {needed / 2**20:.2f} for {ranks} rank(s): "
                "remove files there, or enlarge it "
                f"(of a container: --shm-size; else: mount -o remount,size=1g {FOLDER})"
            )


def siblings() -> list[int]:
    """The processes that the parent of this one has started: ranks of the same job on this node."""
    parent = os.getppid()
    try:
        return [int(each) for each in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def held_files(processes: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that these processes have open or mapped, as far as this user may see."""
    held = set()
    for process in processes:
        with suppress(OSError):
            # In this order: who makes a file has it open until it is mapped.
            for each in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    held.add(os.readlink(each))
            lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
            held |= {line[line.index("/") :] for line in lines if "/" in line}
    return {Path(each) for each in held if each.startswith(f"{FOLDER}/")}


def _processes() -> list[int]:
    return [int(each.name) for each in Path("/proc").glob("[0-9]*")]
