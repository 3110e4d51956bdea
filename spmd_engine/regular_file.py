"""Opening a file that this program made: a regular one of that name, never what a link there points to."""

from __future__ import annotations

import errno
import os
import stat

from spmd_engine.errors import UsageError


def open_regular(path: str | os.PathLike, flags: int, mode: int = 0o666) -> int:
    """As ``os.open``, for regular files alone: no link has another file changed, no pipe keeps this process waiting.

    Raises UsageError for these, and for folders and devices; else OSError.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise UsageError(f"{os.fspath(path)} is no file: move it away; a link, a pipe or a folder is not written to")
