"""The checkpoints in a run's folder: each appears whole, by one rename, or not at all.

    runs/NAME/checkpoints/step-00000040/manifest.json        complete, since it has its name
                                        model-00000.safetensors ...
                          latest -> step-00000040
                          unfinished-...                     of a save that is under way, or broke off

What a name promises is on the disk before the name is: files, their folder, and only then the rename.
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
from spmd_engine.files import open_regular

CHECKPOINTS, LATEST, MANIFEST = "checkpoints", "latest", "manifest.json"
_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"(unfinished|removed|latest)-[0-9a-f]{32}")


class CheckpointFolder:
    """The folder ``checkpoints`` of a run."""

    def __init__(self, run: str | os.PathLike) -> None:
        self.path = Path(run) / CHECKPOINTS

    def complete(self) -> list[Path]:
        """The folders of complete checkpoints, those of earlier steps first.

        Raises CheckpointError where one may not be looked into: it might be the newest.
        """
        found = []
        try:
            for each in self.path.iterdir() if os.path.isdir(self.path) else ():
                matched = _COMPLETE.fullmatch(each.name)
                if matched and (each / MANIFEST).is_file():
                    found.append((int(matched[1]), int(matched[2] or 0), each))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return [path for _, _, path in sorted(found)]

    def newest(self) -> Path | None:
        """The folder of the last complete checkpoint."""
        return (self.complete() or [None])[-1]

    def begin(self) -> Path:
        """A new folder for files that are not yet a checkpoint."""
        unfinished = self.path / f"unfinished-{os.urandom(16).hex()}"
        make_folder(self.path)
        unfinished.mkdir()
        return unfinished

    def commit(self, unfinished: Path, step: int, manifest: str, keep: int) -> Path:
        """Make the files in ``unfinished`` the checkpoint of this step, and leave the last ``keep`` of all.

        Raises OSError where that cannot be done; whatever was complete before still is then.
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
        """Remove what saves have left that broke off, and see that one can begin. No other process may be saving here.

        Raises OSError where nothing could be saved: better to report it before training than after it.
        """
        self.sweep()
        self.begin().rmdir()

    def sweep(self) -> None:
        """Remove what saves have left that broke off. No other process may be saving here."""
        for each in list(self.path.iterdir()) if self.path.is_dir() else ():
            if _UNFINISHED.fullmatch(each.name):
                discard(each)

    def _free_name(self, step: int) -> Path:
        """Of a step that was saved before, in a run that goes on from an earlier one, the newer one is the last.

        A folder that lost its manifest counts, too: its name is taken.
        """
        named = [matched for each in self.path.iterdir() if (matched := _COMPLETE.fullmatch(each.name))]
        again = [int(matched[2] or 0) for matched in named if int(matched[1]) == step]
        return self.path / (f"step-{step:08d}" + (f".{max(again) + 1}" if again else ""))

    def _point_to(self, complete: Path) -> None:
        """Let ``latest`` be a link to it: for people; the newest is found by its number. Not all systems have links.

        Anything else of that name stays.
        """
        link, latest = self.path / f"{LATEST}-{os.urandom(16).hex()}", self.path / LATEST
        if not latest.is_symlink():
            if (latest / MANIFEST).is_file():  # of a run that was copied by what follows links
                discard(latest)
            elif os.path.lexists(latest):
                return
        try:
            link.symlink_to(complete.name)
            os.replace(link, latest)
        except OSError:
            discard(link)

    def _remove_all_but(self, keep: int) -> None:
        for each in self._old(keep):
            removed = self.path / f"removed-{os.urandom(16).hex()}"
            with suppress(OSError):  # a full disk, or a process that reads it, is no reason to fail now
                os.rename(each, removed)
                discard(removed)

    def _old(self, keep: int) -> list[Path]:
        """All complete checkpoints but the last so many; none where they cannot be listed: the new one exists."""
        try:
            return self.complete()[: -max(1, keep)]
        except CheckpointError:
            return []


def step_in_name(folder: Path) -> int | None:
    """The step that a checkpoint's folder is named after; None if it has a name of another kind."""
    matched = _COMPLETE.fullmatch(folder.name)
    return int(matched[1]) if matched else None


def find_checkpoint(path: str | os.PathLike) -> Path:
    """The folder of a checkpoint: ``path`` itself, or the newest of the run whose folder it is.

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
    """Make a folder, if it is not there; raises OSError, which of a link to nowhere says more than that it exists."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if not path.is_symlink():
            raise
        why = f"a link to {os.readlink(path)}, where there is no folder"
        raise FileExistsError(error.errno, why, str(path)) from error


def replace_file(path: Path, text: str) -> None:
    """Write a small file of that name: the old one, or this one whole, is there at any time."""
    unfinished = path.with_name(f".{path.name}-{os.urandom(16).hex()}")
    try:
        with unfinished.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Remove a folder, or a link, as far as that can be done."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        import shutil  # with all kinds of archives, which take longer to load than it mostly takes to save

        shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """See what a folder holds, its names, onto the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some file systems cannot, and then need not
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


# --- One writer a run: a lock in its folder, which the system takes back when the process ends, however it ends
#
# Not all file systems have locks, and on some networks they exclude only processes of the same host. So the holder
# writes its name into the file, and checks before each save that the name is still there.


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
        owner = name.rpartition(", ")[0]
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise UsageError(
                    f"{self._path.parent} is being written by another run{f' ({owner})' if owner else ''}. Wait until "
                    "it has ended, or give another --run"
                ) from None
            logger.warning(
                "%s: this file system has no locks (%s); start no second run there%s",
                self._path,
                error,
                f", and see that the last one has ended: {owner}" if owner else "",
            )

    def check(self) -> None:
        """Raise UsageError if another run has taken the folder meanwhile: from a host that does not see the lock.

        A folder that is gone is no error: a save makes it again.
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
        """Release the lock and remove the name from it."""
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
