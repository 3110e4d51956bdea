"""Shared by benchmarks: options, and figures as medians with ranges, in a table and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from rich.console import Console
from threadpoolctl import threadpool_limits

from spmd_engine.cli.values import FILE, WholeRange
from spmd_engine.errors import UsageError
from spmd_engine.files import check_ending, output_file
from spmd_engine.observability.render import text_table
from spmd_engine.planning.machine.measure import turns_of
from spmd_engine.runtime.mpi_job import find_mpiexec

Option = Callable[[Callable], Callable]


def count_option(name: str, default: int, least: int = 1) -> Option:
    """An option that is a whole number, such as ``--ranks``, ``--steps`` in each round, or ``--rounds``."""
    return click.option(f"--{name}", type=WholeRange(min=least), default=default)


def _check_output(_, __, output: Path | None) -> Path | None:
    """Check ``--output`` before anything is measured."""
    if output:
        check_ending("--output", output, ".json")
        if not output.parent.is_dir():
            raise UsageError(f"--output {output}: there is no such folder")
    return output


output_option = click.option("--output", type=FILE, callback=_check_output, help="A JSON file for all figures.")


def report(columns: Sequence[str], rows: Sequence[Sequence[str]], figures: Any, output: Path | None) -> None:
    """Print the table, with numbers to the right and at least 140 columns also in a pipe; write ``figures`` to
    ``output``."""
    console = Console(highlight=False)
    console.width = max(console.width, 140)
    first, *others = columns
    console.print(text_table([first, *(f">{name}" for name in others)], rows, edge=False))
    if output:
        with output_file(output) as file:
            file.write((json.dumps(figures, indent=1) + "\n").encode())


def spread(values: Sequence[float], scale: float = 1.0, unit: str = "") -> str:
    """The median, and the range."""
    low, high = min(values) * scale, max(values) * scale
    return f"{median(values) * scale:,.4g}{unit} ({low:,.4g}-{high:,.4g})"


# --- Start workers under mpiexec and read their measurements


TIMEOUT = 1200.0  # seconds


def measure(ranks: int, worker: str, config: Mapping[str, Any]) -> Any:
    """Run ``python -m spmd_engine.cli.bench.WORKER`` on ``ranks`` ranks; return its last line, parsed as JSON."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # one core for each rank, as for the share of the peak
    output = start_ranks(ranks, ["-m", f"spmd_engine.cli.bench.{worker}", json.dumps(config)], environment)
    return json.loads(output.splitlines()[-1])


def start_ranks(ranks: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run Python with these arguments on ``ranks`` ranks, and return its standard output.

    Raises UsageError, with the end of its standard error, if it fails or takes too long.
    """
    command, program = [*mpiexec(ranks), sys.executable, *arguments], " ".join(arguments)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"bench: {ranks} ranks took more than {TIMEOUT:g} s for {program}") from error
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-24:])  # Open MPI adds a dozen lines
        raise UsageError(f"bench: {ranks} ranks failed ({done.returncode}) with {program}:\n{tail}")
    return done.stdout


def mpiexec(ranks: int) -> list[str]:
    """The beginning of a command that starts ``ranks`` ranks; raises UsageError if there is no mpiexec."""
    if not (launcher := find_mpiexec()):
        raise UsageError("mpiexec is missing, which starts ranks: pip install 'spmd_engine[mpich]'")
    return [*launcher, "-n", str(ranks)]


# --- The peak: how fast this machine multiplies matrices


_SIZE = 1024


def sgemm_peak() -> float:
    """Floating-point operations a second of one core's float32 matrix products: the best of 20 turns."""
    a, b = (np.random.default_rng(seed).standard_normal((_SIZE, _SIZE)).astype(np.float32) for seed in (0, 1))
    out = np.empty_like(a)
    with threadpool_limits(1, "blas"):
        return 2 * _SIZE**3 / min(turns_of(lambda: np.matmul(a, b, out=out), turns=20))
