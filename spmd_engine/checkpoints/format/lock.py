"""One writer a run: a lock in its folder, which the system takes back when the process ends, however it ends.

Not all file systems have locks, and those of some networks keep out only who is on the same host. So who holds it has
written its name into the file, and looks there before each save whether another one has come.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import Self

from spmd_engine.checkpoints.format.folder import make_folder
from spmd_engine.errors import UsageError
from spmd_engine.files import open_regular

logger = logging.getLogger(__name__)
LOCK = ".lock"


class RunLock:
    """``with RunLock(folder): ...``; raises UsageError where another process, or another run here, holds it."""

    def __init__(self, folder: str | os.PathLike) -> None:
        self._path = Path(folder) / LOCK
        self._handle: int | None = None
        self._name = f"process {os.getpid()} on {os.uname().nodename}, {os.urandom(16).hex()}"

    def __enter__(self) -> Self:
        make_folder(self._path.parent)
        handle = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._take(handle)
            os.pwrite(handle, f"{self._name}\n".encode(), 0)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return self

    def _take(self, handle: int) -> None:
        name = _name_in(handle)
        if name and not name.startswith("process "):
            raise UsageError(f"{self._path} is not the lock of a run: move it away; the name of a run is written there")
        said = name.rpartition(", ")[0]
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise UsageError(
                    f"{self._path.parent} is being written by another run{f' ({said})' if said else ''}. Wait until it "
                    "has ended, or give another --run"
                ) from None
            logger.warning(
                "%s: this file system has no locks (%s); start no second run there%s",
                self._path,
                error,
                f", and see that the last one has ended: {said}" if said else "",
            )

    def check(self) -> None:
        """Raise UsageError if another run has taken the folder meanwhile: from a host that does not see the lock.

        Nothing is wrong where the folder is gone: who saves makes it again.
        """
        try:
            handle = open_regular(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            said = _name_in(handle)
        finally:
            os.close(handle)
        if said != self._name:
            who = said.rpartition(", ")[0]
            raise UsageError(
                f"{self._path.parent} is being written by another run{f' ({who})' if who else ''}, which has begun "
                "after this one: the lock of this one did not keep it out"
            )

    def __exit__(self, *_: object) -> None:
        """Give it back, with no name in it: the next one need not ask for this process."""
        if self._handle is not None:
            try:
                if _name_in(self._handle) == self._name:
                    os.pwrite(self._handle, b"\n", 0)
            finally:
                os.close(self._handle)
                self._handle = None


def _name_in(handle: int) -> str:
    """The name in an open lock: its first line. What follows was there before, since a lock is never truncated."""
    line, _, _ = os.pread(handle, 200, 0).partition(b"\n")
    return line.strip(b"\0 ").decode(errors="replace")
