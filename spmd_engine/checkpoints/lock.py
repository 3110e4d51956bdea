"""One writer a run: a lock in its folder, which the system takes back when the process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import Self

from spmd_engine.errors import UsageError

logger = logging.getLogger(__name__)
LOCK = ".lock"


class RunLock:
    """``with RunLock(folder): ...``; raises UsageError where another process, or another run here, holds it."""

    def __init__(self, folder: str | os.PathLike) -> None:
        self._path = Path(folder) / LOCK
        self._handle: int | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.exists(self._path) and not os.path.isfile(self._path):
            raise UsageError(
                f"{self._path} is no file: move it away; a run locks it, so that no other one writes there"
            )
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            said = os.pread(handle, 200, 0).decode(errors="replace").strip()
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(handle)
                raise UsageError(
                    f"{self._path.parent} is being written by another run{f' ({said})' if said else ''}. Wait until it "
                    "has ended, or give another --run"
                ) from None
            logger.warning("%s: this file system has no locks (%s); start no second run there", self._path, error)
        else:
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        self._handle = handle
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
