"""Whether somebody is watching: under mpiexec a rank's own output is always a pipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def launcher_has_terminal(levels: int = 4) -> bool:
    """Whether standard error of this process, or of the mpiexec that started it here, is a terminal."""
    if sys.stderr.isatty():
        return True
    process = os.getpid()
    for _ in range(levels):
        try:
            status = Path(f"/proc/{process}/stat").read_text()
            process = int(status.rpartition(")")[2].split()[1])  # the parent
            name = Path(f"/proc/{process}/comm").read_text().strip()
            if name.startswith(("mpiexec", "mpirun", "orterun", "prterun")):
                return os.readlink(f"/proc/{process}/fd/2").startswith(("/dev/pts/", "/dev/tty"))
        except (OSError, ValueError, IndexError):
            return False
    return False


class Pipe:
    """What stands for a console where nobody looks on: lines on standard error."""

    is_terminal = False

    def print(self, text: str, **_: object) -> None:
        """A line, as it is."""
        print(text, file=sys.stderr)


def console() -> Console | Pipe:
    """Rank 0's console on standard error; colours and live bars only where there is a terminal."""
    if not launcher_has_terminal():
        return Pipe()
    from rich.console import Console  # which takes longer to load than a small step

    return Console(stderr=True, force_terminal=True, highlight=False)
