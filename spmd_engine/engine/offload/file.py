"""Offloaded arrays in a file on a disk.

After Rajbhandari et al., "ZeRO-Infinity" (2021). The file has no name: it is unlinked as soon as it is open, so that it
vanishes with its process, also a killed one, and nobody can remove it in the meantime. Its space is reserved before it
is used. Threads move pieces between the file and aligned buffers by explicit reads and writes, past the system's page
cache, which would count against the memory limit of the job. A memory map would end a process by SIGBUS on a full disk.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4
from weakref import finalize

from spmd_engine.arrays import CPU, Backend
from spmd_engine.engine.offload.target import OffloadError, OffloadTarget


class FileTarget(OffloadTarget):
    """A file in a folder."""

    remedy = "Free space, or name another disk by --offload-dir"

    def __init__(self, folder: str, backend: Backend = CPU) -> None:
        """Raises OffloadError if the folder cannot hold such a file."""
        super().__init__()
        self.where = f"offload file in {folder}"
        if kind := _in_memory(folder):
            raise OffloadError(f"--offload-dir {folder}: it is in memory ({kind}); name a folder on a disk")
        path = Path(folder, f".spmd-offload-{uuid4().hex}")
        try:
            self._descriptor, self._direct = _open(path)
            os.unlink(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OffloadError(f"--offload-dir {folder}: it cannot be written ({reason}); name another one") from error
        finalize(self, os.close, self._descriptor)

    def grow(self, offset: int, size: int) -> None:
        os.posix_fallocate(self._descriptor, offset, size)

    def read(self, offset: int, view: memoryview) -> int:
        moved = os.preadv(self._descriptor, [view], offset)
        self._uncache(offset, moved)
        return moved

    def write(self, offset: int, view: memoryview) -> int:
        moved = os.pwritev(self._descriptor, [view], offset)
        self._uncache(offset, moved)
        return moved

    def _uncache(self, offset: int, size: int) -> None:
        """Where direct transfers do not work, drop what the page cache has of the file."""
        if not self._direct and hasattr(os, "posix_fadvise"):
            os.fdatasync(self._descriptor)
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_DONTNEED)


def _open(path: Path) -> tuple[int, bool]:
    """A new file, and whether it is read and written past the page cache."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with suppress(OSError, AttributeError):  # a file system, or a system, without direct transfers
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags, 0o600), False


def _in_memory(folder: str) -> str:
    """The kind of the file system of a folder if it is in memory, else ""."""
    with suppress(OSError):
        device = f"{os.major(dev := os.stat(folder).st_dev)}:{os.minor(dev)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            kind = fields[fields.index("-") + 1]
            if fields[2] == device and kind in ("tmpfs", "ramfs"):
                return kind
    return ""
