"""Starts workers under mpiexec and reads what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Any

from spmd_engine.errors import UsageError

TIMEOUT = 1200.0  # seconds


def measure(ranks: int, worker: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What ``python -m spmd_engine.cli.bench.WORKER`` prints as its last line, on so many ranks."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # a core for each rank, as the share of the peak has it
    output = launch(ranks, [f"spmd_engine.cli.bench.{worker}", json.dumps(config)], environment)
    return json.loads(output.splitlines()[-1])


def launch(ranks: int, module: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What ``python -m MODULE``, with its arguments, prints on so many ranks.

    Raises UsageError, with the end of what it wrote, if it fails or takes too long.
    """
    return start_ranks(ranks, ["-m", *module], environment)


def start_ranks(ranks: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """As ``launch``, with the arguments of Python."""
    command, what = [mpiexec(), "-n", str(ranks), sys.executable, *arguments], " ".join(arguments)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"bench: {ranks} ranks took more than {TIMEOUT:g} s for {what}") from error
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-24:])  # Open MPI adds a dozen of its own
        raise UsageError(f"bench: {ranks} ranks failed ({done.returncode}) with {what}:\n{tail}")
    return done.stdout


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options by name as a command line has them: ``{"zero": 3}`` is ``--zero 3``; True stands for a flag."""
    arguments: list[str] = []
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return arguments


def mpiexec() -> str:
    """The mpiexec beside this Python, else the one on the PATH; raises UsageError if there is none."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else which("mpiexec")
    if not found:
        raise UsageError("bench starts ranks with mpiexec, and there is none: pip install 'spmd_engine[mpich]'")
    return found
