"""Files that commands write to the path of an option, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from spmd_engine.errors import UsageError

#: Endings of names that stand for a format.
KNOWN = {
    *(".npy", ".npz", ".csv", ".tsv", ".json", ".jsonl", ".toml", ".yaml", ".txt", ".tokens", ".svg", ".png", ".pdf"),
    *(".safetensors", ".gguf", ".onnx", ".h5", ".hdf5", ".pt", ".pth", ".ckpt", ".bin", ".pickle", ".pkl", ".zip"),
}


def check_ending(what: str, path: str | Path, *endings: str) -> None:
    """Raise UsageError if a name has the ending of another format than the one that is written, which has these
    ``endings``; a folder has none."""
    ending = Path(path).suffix.lower()
    if ending in KNOWN and ending not in endings:
        written = f"a {endings[0]} file" if endings else "a folder"
        raise UsageError(f"{what} {path}: {written} is written here, no {ending} file; give another name")


@contextmanager
def output_file(path: str | Path, option: str = "--output") -> Iterator[BinaryIO]:
    """A file to write to, which gets its name when it is complete; until then, the old file stays.

    Raises UsageError, which names the option and the file, for errors of the file system.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a device or a pipe; a folder is refused
            with path.open("wb") as file:
                yield file
            return
        target = path.resolve()  # through links, which stay
        fresh = target.with_name(f".{target.name}.{os.urandom(16).hex()}")  # a new name, at which there is no link
        try:
            with fresh.open("xb") as file:
                yield file
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written ({error.strerror or error})") from error
