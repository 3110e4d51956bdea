"""Copies a job's output in a process of its own, which loses what it cannot write: mpiexec would end the job instead.

The process outlives the one that started it, and ends when the job has.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATIENCE = 5.0  #: seconds to wait for the last output after the job has ended


@contextmanager
def relayed_output() -> Iterator[dict[str, int]]:
    """Arguments of ``Popen`` for a job, whose output a relay then copies to this process's, except to a terminal."""
    numbers = {"stdout": 1, "stderr": 2}
    relays = {
        name: subprocess.Popen(
            [sys.executable, "-IS", __file__],
            stdin=subprocess.PIPE,
            stdout=number,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals of a terminal are for the job, which may still write
        )
        for name, number in numbers.items()
        if not os.isatty(number)
    }
    inputs = {name: relay.stdin for name, relay in relays.items() if relay.stdin}
    try:
        yield {name: pipe.fileno() for name, pipe in inputs.items()}
    finally:
        for pipe in inputs.values():
            pipe.close()
        for relay in relays.values():
            with suppress(subprocess.TimeoutExpired):
                relay.wait(PATIENCE)


def copy() -> None:
    """Copy standard input to standard output until it ends."""
    while data := os.read(0, 1 << 16):
        with suppress(OSError):
            while data:
                try:
                    data = data[os.write(1, data) :]
                except BlockingIOError:  # another program made the file description so
                    select.select([], [1], [])


if __name__ == "__main__":
    copy()
