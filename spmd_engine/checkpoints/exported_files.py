"""New files beside others' files: all of them have their names when all are complete, and nothing there is replaced."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from spmd_engine.errors import CheckpointError


class ExportedFiles:
    """Files that are being written under other names: ``open`` each, ``commit`` all, and ``discard`` in any case."""

    def __init__(self) -> None:
        self._made: list[Path] = []
        self._paths: list[Path] = []

    def open(self, path: Path) -> BinaryIO:
        """A new file that is to be ``path``, under its ``unfinished_name``.

        Raises CheckpointError where something of either name is there already, OSError where it cannot be made.
        """
        self._refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = unfinished_name(path).open("xb")
        except FileExistsError:
            raise CheckpointError(
                f"{unfinished_name(path)} is there already, of an export that is going on or broke off: remove it, if "
                "none is going on"
            ) from None
        self._made.append(unfinished_name(path))
        self._paths.append(path)
        return file

    def commit(self) -> None:
        """See them onto the disk and give them their names, the first ones first. Raises as ``open`` does."""
        for path in self._paths:
            self._refuse_existing(path)
            with unfinished_name(path).open("rb") as file:
                os.fsync(file.fileno())
        for path in self._paths:
            os.rename(unfinished_name(path), path)
            self._made.append(path)
        self._made.clear()

    def discard(self) -> None:
        """Remove what was made, unless it was committed."""
        for path in self._made:
            with suppress(OSError):
                path.unlink()
        self._made.clear()

    def _refuse_existing(self, path: Path) -> None:
        if os.path.lexists(path):
            raise CheckpointError(f"{path} is there already; export to another place, or move it away")


def unfinished_name(path: Path) -> Path:
    """What a file is called until it is complete."""
    return path.with_name(f".{path.name}-unfinished")
