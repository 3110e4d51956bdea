"""Files that are written: only regular ones, those of a command's options completely or not at all, and some that
other users can neither hold nor write."""

from __future__ import annotations

import errno
import logging
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from spmd_engine.errors import UsageError

logger = logging.getLogger(__name__)

#: File name endings that denote a format.
KNOWN = {
    *(".npy", ".npz", ".csv", ".tsv", ".json", ".jsonl", ".toml", ".yaml", ".txt", ".tokens", ".svg", ".png", ".pdf"),
    *(".safetensors", ".gguf", ".onnx", ".h5", ".hdf5", ".pt", ".pth", ".ckpt", ".bin", ".pickle", ".pkl", ".zip"),
}


def open_regular(path: str | os.PathLike, flags: int, mode: int = 0o666, *, follow: bool = False) -> int:
    """``os.open`` for regular files only: no pipe blocks this process and, unless ``follow``, no link redirects it.

    Raises UsageError for links, pipes, folders and devices; OSError for other errors.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise UsageError(f"{os.fspath(path)} is no file: move it away; a link, a pipe or a folder does not do here")


def open_private(path: Path, flags: int) -> int:
    """``open_regular`` for a lock or a secret: an open file is enough to lock it, even one that can only be read.

    Other users have no access; the folder's group has, where it can write to the folder. A file with a wider mode, of
    an earlier version, gets this one; if that is not permitted, a warning names the file.
    """
    folder = os.stat(path.parent)
    shared = bool(folder.st_mode & stat.S_IWGRP)
    mode = 0o660 if shared else 0o600
    handle = open_regular(path, flags, mode)
    status = os.fstat(handle)
    try:
        if shared and status.st_gid != folder.st_gid and status.st_uid == os.geteuid():
            os.fchown(handle, -1, folder.st_gid)
        if (before := stat.S_IMODE(status.st_mode)) & ~mode:
            os.fchmod(handle, before & mode)
    except OSError as error:
        logger.warning(
            "%s: other users can hold or change it (mode %o, owner %d), and this process cannot prevent that (%s)",
            path,
            stat.S_IMODE(status.st_mode),
            status.st_uid,
            error.strerror,
        )
    return handle


def check_owner(path: Path, file: os.stat_result) -> None:
    """Raise UsageError unless this ``file`` at ``path`` is of root, of this user, of the folder's owner, or of a member
    of the folder's group where the group can write: others may put files into folders where all users can write."""
    folder = os.stat(path.parent)
    if file.st_uid in (0, os.geteuid(), folder.st_uid):
        return
    if folder.st_mode & stat.S_IWGRP:
        with suppress(KeyError):  # a user without a name
            user = pwd.getpwuid(file.st_uid)
            if folder.st_gid in os.getgrouplist(user.pw_name, user.pw_gid):
                return
    raise UsageError(f"{path} is ignored: it belongs to user {file.st_uid}, not to the users of its folder")


class RequestFile:
    """A file by which other processes ask this one for something; one that ``check_owner`` refuses is ignored, with one
    warning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: os.stat_result | None = None  # at the last look
        self._done: os.stat_result | None = None  # what is ignored, or is answered and cannot be removed

    def is_there(self) -> bool:
        """Whether there is a new request, or something else in its place."""
        try:
            self._found = found = os.lstat(self.path)
            if _is_same(found, self._done):
                return False
            check_owner(self.path, found)
        except OSError:
            self._done = None
            return False
        except UsageError as error:
            logger.warning("%s", error)
            self._done = found
            return False
        return True

    def answered(self) -> None:
        """Remove the request that ``is_there`` found, unless another one has replaced it since. If it cannot be
        removed, it counts as no new one."""
        with suppress(OSError):
            if _is_same(os.lstat(self.path), self._found):
                self._done = self._found
                self.path.unlink()
                self._done = None


def _is_same(file: os.stat_result, other: os.stat_result | None) -> bool:
    """Whether this is the same file with the same content: a new one may get the number of a removed one."""
    return other is not None and all(
        getattr(file, name) == getattr(other, name) for name in ("st_dev", "st_ino", "st_mode", "st_mtime_ns")
    )


def check_ending(what: str, path: str | Path, *endings: str) -> None:
    """Raise UsageError if the ending of ``path`` denotes another format than the written one.

    ``endings``: of the written format; none for a folder.
    """
    ending = Path(path).suffix.lower()
    if ending in KNOWN and ending not in endings:
        written = f"a {endings[0]} file" if endings else "a folder"
        raise UsageError(f"{what} {path}: {written} is written here, no {ending} file; give another name")


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name this file in an OSError that names none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` when it is complete: at any time, that is the old or the complete new file.

    Other programs cannot guess its name.
    """
    unfinished = path.with_name(f".{path.name}-{os.urandom(16).hex()}")
    try:
        with naming(path), unfinished.open("xb") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def output_file(path: str | Path, option: str = "--output", *, follow: bool = True) -> Iterator[BinaryIO]:
    """A file to write to, which replaces ``path`` when it is complete; until then, the old file stays.

    ``follow``: whether a link, a device or a pipe at ``path`` is written through, as for a name that the user gave.

    Raises UsageError, which names the option and the file, for errors of the file system.
    """
    path = Path(path)
    try:
        if follow and path.exists() and not path.is_file():  # a device or a pipe; opening a folder fails
            with path.open("wb") as file:
                yield file
            return
        with replacing(path.resolve() if follow else path) as file:  # keeps links
            yield file
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written ({error.strerror or error})") from error
