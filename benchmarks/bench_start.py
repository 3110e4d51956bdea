"""Times a run of one step, from the launcher to its end, and the start of Python and MPI alone.

python benchmarks/bench_start.py --ranks 8
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import click

from spmd_engine.cli.bench.measuring import (
    count_option,
    mpiexec,
    output_option,
    report,
    spread,
    start_ranks,
)

IMPORTS = "import numpy, spmd_engine, mpi4py.MPI"
WORKER = ["-P", str(Path(__file__).with_name("bench_start_phases.py")), "{}"]  # not -m, which imports what is measured
ONE_STEP = ["--steps", "1", "--eval-every", "0", "--eval-samples", "1", "--sample", "0"]


@click.command()
@count_option("ranks", 8)
@count_option("rounds", 3)
@output_option
def start(ranks: int, rounds: int, output: Path | None) -> None:
    """Time the whole of 'train --steps 1', with the reading of its data and the writing of its checkpoint.

    It alternates, and is compared, with ranks that only import NumPy, this package and MPI. The CPU time of each part
    is the mean over all ranks. Everything is started once before, so that compiled files exist.
    """
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    shell = {**os.environ, "PYTHONPATH": path}
    shell.pop("PYTHONDONTWRITEBYTECODE", None)
    kinds = ["NumPy", *(["compiled loops"] if find_spec("numba") else [])]
    seconds: dict[str, list[float]] = {name: [] for name in ("imports alone", *kinds)}
    phases: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    environments = {kind: {**shell, "SPMD_FAST": str(int(kind != "NumPy"))} for kind in kinds}
    for environment in environments.values():
        _train(ranks, environment)
    for _ in range(rounds):
        seconds["imports alone"].append(_time(lambda: start_ranks(ranks, ["-c", IMPORTS], shell)))
        for kind, environment in environments.items():
            seconds[kind].append(_time(lambda environment=environment: _train(ranks, environment)))
            for phase, cpu in json.loads(start_ranks(ranks, WORKER, environment).splitlines()[-1]).items():
                phases[kind].setdefault(phase, []).append(sum(cpu) / ranks)
    imports = seconds["imports alone"]
    rows = [
        [name, spread(values, unit=" s"), spread([a / b for a, b in zip(values, imports, strict=True)])]
        for name, values in seconds.items()
    ]
    figures = {"seconds": seconds, "cpu_seconds": phases, "python": sys.version, "mpiexec": mpiexec(ranks)[0]}
    report([f"{ranks} ranks", "from the launch to the end", "times imports alone"], rows, figures, output)
    names = dict.fromkeys(phase for kind in kinds for phase in phases[kind])
    lines = [[name, *(spread(phases[kind][name], 1000, " ms") for kind in kinds)] for name in names]
    report(["CPU time of a rank, mean", *kinds], lines, figures, None)


def _time(do: Callable[[], object]) -> float:
    began = perf_counter()
    do()
    return perf_counter() - began


def _train(ranks: int, environment: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = [*ONE_STEP, "--batch-size", str(ranks), "--run", f"{folder}/run"]
        start_ranks(ranks, ["-m", "spmd_engine", "train", *options], environment)


if __name__ == "__main__":
    start()
