"""Benchmarks of the engine itself, each comparison alternating in one run: medians, spread and ratios.

    python scripts/bench.py collectives     our collectives, with and without checks, beside the MPI library's
    python scripts/bench.py oversubscribed  training on 8 ranks of this machine's cores against 2 ranks
    python scripts/bench.py start           from the launch of 8 ranks to the end of the first step

Speed against PyTorch: scripts/bench_peers.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import click

HERE = Path(__file__).resolve().parent
WORKER = HERE / "bench_worker_ours.py"
NANO = {"layers": 8, "width": 96, "heads": 6, "context": 128, "vocabulary": 257, "threads": 1}
TRAINING = {"learning_rate": 3e-4, "betas": [0.9, 0.95], "epsilon": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}


def mpiexec() -> str:
    """The mpiexec beside this Python, else the one on the PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else "mpiexec"


def launch(ranks: int, *arguments: str, timeout: float = 600) -> str:
    command = [mpiexec(), "-n", str(ranks), sys.executable, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=timeout).stdout


def spread(values: list[float], scale: float = 1.0, unit: str = "") -> str:
    low, high = min(values) * scale, max(values) * scale
    return f"{median(values) * scale:,.4g}{unit} ({low:,.4g}-{high:,.4g})"


@click.group(help=__doc__)
def bench() -> None:
    pass


@bench.command()
@click.option("--ranks", default=2, show_default=True)
@click.option("--rounds", default=20, show_default=True)
def collectives(ranks: int, rounds: int) -> None:
    """Seconds a call: ours with checks, ours without, and the MPI library's own."""
    click.echo(launch(ranks, str(HERE / "bench_worker_collectives.py"), str(rounds)), nl=False)


@bench.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--steps", default=12, show_default=True)
@click.option("--batch-size", default=32, show_default=True)
def oversubscribed(rounds: int, steps: int, batch_size: int) -> None:
    """Ranks that wait must not spin: tokens/s of gpt-nano on 2 ranks and on 8, data parallel."""
    config = {**NANO, **TRAINING, "batch_size": batch_size, "steps": steps, "warmup": 3, "seed": 0}
    speeds: dict[int, list[float]] = {2: [], 8: []}
    for _ in range(rounds):
        for ranks in speeds:
            result = json.loads(launch(ranks, str(WORKER), json.dumps(config)).splitlines()[-1])
            speeds[ranks].append(batch_size * 128 / median(result["step_seconds"]))
    for ranks, values in speeds.items():
        click.echo(f"{ranks} ranks on {os.cpu_count()} cores: {spread(values)} tokens/s")
    ratios = [eight / two for two, eight in zip(speeds[2], speeds[8], strict=True)]
    click.echo(f"8 ranks / 2 ranks: {spread(ratios)}")


@bench.command()
@click.option("--ranks", default=8, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def start(ranks: int, rounds: int) -> None:
    """The whole of 'train --steps 1' on 8 ranks, reading the corpus and writing the checkpoint included."""
    seconds = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            options = ["--steps", "1", "--eval-every", "0", "--eval-samples", "1", "--sample", "0"]
            began = perf_counter()
            launch(ranks, "-m", "spmd_engine", "train", *options, "--batch-size", str(ranks), "--run", f"{folder}/run")
            seconds.append(perf_counter() - began)
    click.echo(f"{ranks} ranks, launch to end of a run of one step: {spread(seconds, unit=' s')}")


if __name__ == "__main__":
    bench()
