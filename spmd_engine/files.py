"""Output files: only regular files, and the files of a command's options completely or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from spmd_engine.errors import UsageError

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


def check_ending(what: str, path: str | Path, *endings: str) -> None:
    """Raise UsageError if the ending of ``path`` denotes another format than the written one.

    ``endings``: of the written format; none for a folder.
    """
    ending = Path(path).suffix.lower()
    if ending in KNOWN and ending not in endings:
        written = f"a {endings[0]} file" if endings else "a folder"
        raise UsageError(f"{what} {path}: {written} is written here, no {ending} file; give another name")


@contextmanager
def output_file(path: str | Path, option: str = "--output") -> Iterator[BinaryIO]:
    """A file to write to, which replaces ``path`` when it is complete; until then, the old file stays.

    Raises UsageError, which names the option and the file, for errors of the file system.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a device or a pipe; opening a folder fails
            with path.open("wb") as file:
                yield file
            return
        target = path.resolve()  # keeps links
        temporary = target.with_name(f".{target.name}.{os.urandom(16).hex()}")  # other programs cannot guess it
        try:
            with temporary.open("xb") as file:
                yield file
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written ({error.strerror or error})") from error
