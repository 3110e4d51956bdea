"""Compiled loops are kept on disk: one process compiles what is missing there, and the others wait to find it.

The lock lies in the cache's own folder, so only those wait for each other who share a cache, and nobody else can make
it before them. Who finds all loops takes no lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from numba.core import event

WARN_AFTER = 10.0  # seconds of waiting after which a process says what it waits for
LIMIT = 180.0  # seconds of waiting after which it compiles beside the one that holds the lock
PERIOD = 0.1  # seconds between looks whether the lock is free

logger = logging.getLogger(__name__)


def prepare(call_all: Callable[[], None], folder: Path) -> None:
    """Have every loop that ``call_all`` calls, loaded from the cache in ``folder`` or compiled.

    Who has waited for too long, or cannot have the lock, compiles by itself. It does not go on with NumPy: ranks of
    one job must compute with the same kernels. And to compile the same twice costs time alone, as Numba replaces
    files of its cache as a whole.
    """
    path, began = folder / "spmd_engine.lock", time.monotonic()
    while not _are_kept(call_all):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError:  # a folder that only others may write to
            return call_all()
        try:
            if _is_free(descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
                return call_all()
            if not _becomes_free(descriptor, path, began):
                return call_all()
        except OSError as error:  # a file system without locks
            logger.warning("no lock on %s (%s): this process compiles its loops without", path, error)
            return call_all()
        finally:
            os.close(descriptor)  # and with it goes the lock: who waited, looks for the loops first


class _NotKept(Exception):
    """A loop must be compiled."""


class _Refuse(event.Listener):
    """Stops this thread where it is about to compile."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def on_start(self, _: event.Event) -> None:
        if threading.get_ident() == self._thread:
            raise _NotKept

    def on_end(self, _: event.Event) -> None:
        pass


def _are_kept(call_all: Callable[[], None]) -> bool:
    """Whether all loops could be loaded, with nothing to compile."""
    try:
        with event.install_listener("numba:compile", _Refuse()):
            call_all()
    except _NotKept:
        return False
    return True


def _is_free(descriptor: int) -> bool:
    """Take the lock, if nobody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _becomes_free(descriptor: int, path: Path, began: float) -> bool:
    """Wait for the lock, and take it; False if it is not to be had in time."""
    warned = False
    while not _is_free(descriptor):
        waited = time.monotonic() - began
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        if waited > LIMIT:
            logger.warning("waited %.0f s: %s still has the lock %s. Compiles beside it", waited, holder, path)
            return False
        if waited > WARN_AFTER and not warned:
            warned = True
            logger.warning("has waited %.0f s for %s, which compiles loops and has the lock %s", waited, holder, path)
        time.sleep(PERIOD)
    return True
