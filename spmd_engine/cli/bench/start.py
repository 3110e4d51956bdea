"""``bench start``: from the launcher to the end of a run of one step."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from time import perf_counter

import click

from spmd_engine.cli.bench.launch import TIMEOUT, mpiexec, spread
from spmd_engine.errors import UsageError


@click.command(short_help="Seconds from the launch of ranks to the end of a run of one step.")
@click.option("--ranks", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
def start(ranks: int, rounds: int) -> None:
    """Time the whole of 'train --steps 1', the reading of its data and the writing of its checkpoint included."""
    seconds = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            options = ["--steps", "1", "--eval-every", "0", "--eval-samples", "1", "--sample", "0"]
            command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "spmd_engine", "train", *options]
            began = perf_counter()
            options = ["--batch-size", str(ranks), "--run", f"{folder}/run"]
            done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=TIMEOUT)
            seconds.append(perf_counter() - began)
            if done.returncode:
                raise UsageError(f"bench start: {ranks} ranks failed:\n{done.stderr.strip()}")
    click.echo(f"{ranks} ranks, from the launch to the end of a run of one step: {spread(seconds, unit=' s')}")
