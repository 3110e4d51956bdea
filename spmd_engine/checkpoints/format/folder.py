"""The checkpoints in a run's folder: one rename makes each appear complete, or it does not appear at all.

    runs/NAME/checkpoints/step-00000040/manifest.json        complete, as its name shows
                                        model-00000.safetensors ...
                          latest -> step-00000040
                          unfinished-...                     a save that is running, or failed

All content is on the disk before its name appears: first the files, then their folder, and only then the rename.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Self

from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.files import open_private, open_regular, replacing

CHECKPOINTS, LATEST, MANIFEST = "checkpoints", "latest", "manifest.json"
_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"(unfinished|removed|latest)-[0-9a-f]{32}")


class CheckpointFolder:
    """The folder ``checkpoints`` of a run."""

    def __init__(self, run: str | os.PathLike) -> None:
        self.path = Path(run) / CHECKPOINTS

    def complete(self) -> list[Path]:
        """The folders of complete checkpoints, in the order of their steps.

        Raises CheckpointError if a folder cannot be read, because it may be the newest checkpoint.
        """
        checkpoints = []
        try:
            for path in self.path.iterdir() if os.path.isdir(self.path) else ():
                match = _COMPLETE.fullmatch(path.name)
                if match and (path / MANIFEST).is_file():
                    checkpoints.append((int(match[1]), int(match[2] or 0), path))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return [path for _, _, path in sorted(checkpoints)]

    def newest(self) -> Path | None:
        """The folder of the last complete checkpoint."""
        return (self.complete() or [None])[-1]

    def begin(self) -> Path:
        """Create a folder for the files of a checkpoint that is not yet complete."""
        unfinished = self.path / f"unfinished-{os.urandom(16).hex()}"
        make_folder(self.path)
        unfinished.mkdir()
        return unfinished

    def commit(self, unfinished: Path, step: int, manifest: str, keep: int) -> Path:
        """Make the files in ``unfinished`` the checkpoint of this step; remove all but the last ``keep`` checkpoints.

        Raises OSError if that fails; earlier checkpoints then stay complete.
        """
        path = unfinished / MANIFEST
        with path.open("x") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        _sync(unfinished)
        complete = self._free_name(step)
        os.rename(unfinished, complete)
        _sync(self.path)
        self._point_to(complete)
        self._remove_all_but(keep)
        return complete

    def prepare(self) -> None:
        """Remove the files of failed saves, and check that a save can begin. No other process may save to this folder.

        Raises OSError if nothing can be saved here, so that a run reports it before training and not after it.
        """
        self.sweep()
        self.begin().rmdir()

    def sweep(self) -> None:
        """Remove the files of failed saves. No other process may save to this folder."""
        for path in list(self.path.iterdir()) if self.path.is_dir() else ():
            if _UNFINISHED.fullmatch(path.name):
                discard(path)

    def _free_name(self, step: int) -> Path:
        """A name that is not in use. If a resumed run saves a step again, the newer checkpoint sorts after the older.

        The name of a folder without a manifest counts as used, too.
        """
        matches = [match for path in self.path.iterdir() if (match := _COMPLETE.fullmatch(path.name))]
        versions = [int(match[2] or 0) for match in matches if int(match[1]) == step]
        return self.path / (f"step-{step:08d}" + (f".{max(versions) + 1}" if versions else ""))

    def _point_to(self, complete: Path) -> None:
        """Make ``latest`` a link to a checkpoint, for people; programs find the newest by its number.

        A file or folder of that name that is no such link stays. Not all file systems have links.
        """
        link, latest = self.path / f"{LATEST}-{os.urandom(16).hex()}", self.path / LATEST
        if not latest.is_symlink():
            if (latest / MANIFEST).is_file():  # left by a program that copied the run and followed links
                discard(latest)
            elif os.path.lexists(latest):
                return
        try:
            link.symlink_to(complete.name)
            os.replace(link, latest)
        except OSError:
            discard(link)

    def _remove_all_but(self, keep: int) -> None:
        for checkpoint in self._old(keep):
            removed = self.path / f"removed-{os.urandom(16).hex()}"
            with suppress(OSError):  # a full disk, or a process that reads the folder, must not fail the save
                os.rename(checkpoint, removed)
                discard(removed)

    def _old(self, keep: int) -> list[Path]:
        """All complete checkpoints but the last ``keep``; none if they cannot be listed, as the save has succeeded."""
        try:
            return self.complete()[: -max(1, keep)]
        except CheckpointError:
            return []


def step_in_name(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for a name of another form."""
    match = _COMPLETE.fullmatch(folder.name)
    return int(match[1]) if match else None


def find_checkpoint(path: str | os.PathLike) -> Path:
    """The folder of a checkpoint: ``path`` itself, or the newest checkpoint of the run in the folder ``path``.

    Raises CheckpointError if there is none.
    """
    path = Path(path)
    if os.path.isfile(path / MANIFEST):
        return path
    for run in (path, path.parent if path.name == CHECKPOINTS else path):
        if newest := CheckpointFolder(run).newest():
            return newest
    raise CheckpointError(f"{path}: no such checkpoint: neither {MANIFEST} there, nor a complete one in {CHECKPOINTS}/")


def make_folder(path: Path) -> None:
    """Make a folder if it does not exist. Raises OSError; for a broken link, the error shows the link's target."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if not path.is_symlink():
            raise
        why = f"a link to {os.readlink(path)}, where there is no folder"
        raise FileExistsError(error.errno, why, str(path)) from error


def replace_file(path: Path, text: str) -> None:
    """Write a small file, also to the disk, in place of an older one: see ``replacing``."""
    with replacing(path) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def discard(path: Path) -> None:
    """Remove a folder or a link, ignoring errors."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        import shutil  # here, because it imports archive formats, which often takes longer than a save

        shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some file systems cannot flush folders, and do not need to
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


# --- One writer for each run: a lock in its folder, which the system releases when the process ends in any way
#
# Not all file systems have locks, and on some networks locks exclude only processes of the same host. So the holder
# writes its name into the lock file, and checks before each save that the file still has this name.


logger = logging.getLogger(__name__)
LOCK = ".lock"


class RunLock:
    """``with RunLock(folder): ...``; raises UsageError if another process, or another run in this one, has the lock."""

    def __init__(self, folder: str | os.PathLike) -> None:
        self._path = Path(folder) / LOCK
        self._handle: int | None = None
        self._name = f"process {os.getpid()} on {os.uname().nodename}, {os.urandom(16).hex()}"

    def __enter__(self) -> Self:
        make_folder(self._path.parent)
        handle = open_private(self._path, os.O_RDWR | os.O_CREAT)
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
            raise UsageError(f"{self._path} is not the lock of a run: move it away; a run writes its name there")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise UsageError(f"{self._taken_by(name)}. Wait until it has ended, or give another --run") from None
            logger.warning(
                "%s: this file system has no locks (%s); start no second run there%s",
                self._path,
                error,
                f", and see that the last one has ended: {owner}" if (owner := _owner(name)) else "",
            )

    def _taken_by(self, name: str) -> str:
        owner = _owner(name)
        return f"{self._path.parent} is being written by another run{f' ({owner})' if owner else ''}"

    def check(self) -> None:
        """Raise UsageError if another run has since taken the folder, on a host that does not see the lock.

        A missing folder is no error: a save makes it again.
        """
        try:
            name = _name_at(self._path)
        except FileNotFoundError:
            return
        if name != self._name:
            raise UsageError(
                f"{self._taken_by(name)}, which has begun after this one and does not see its lock. Stop one of the two"
            )

    def __exit__(self, *_: object) -> None:
        """Release the lock and remove the name from it."""
        if self._handle is not None:
            try:
                if _name_in(self._handle) == self._name:
                    os.pwrite(self._handle, b"\n", 0)
            finally:
                os.close(self._handle)
                self._handle = None


def lock_owner(folder: Path) -> tuple[int, str] | None:
    """The process and the host that write a run to the folder, or were killed while they did; None if none does."""
    try:
        owner = _OWNER.match(_name_at(folder / LOCK))
    except (OSError, UsageError):
        return None
    return (int(owner[1]), owner[2]) if owner else None


_OWNER = re.compile(r"process (\d{1,9}) on (.*), ")


def _owner(name: str) -> str:
    """The process and the host in the name of a lock."""
    return name.rpartition(", ")[0]


def _name_at(path: Path) -> str:
    """The name in a lock file."""
    with open(open_regular(path, os.O_RDONLY)) as file:
        return _name_in(file.fileno())


def _name_in(handle: int) -> str:
    """The first line of an open lock file. Later lines are old names, since the file is never truncated."""
    line, _, _ = os.pread(handle, 200, 0).partition(b"\n")
    return line.strip(b"\0 ").decode(errors="replace")
