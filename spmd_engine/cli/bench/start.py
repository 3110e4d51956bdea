"""``bench start``: from the launcher to the end of a run of one step."""

from __future__ import annotations

import tempfile
from time import perf_counter

import click

from spmd_engine.cli.bench.figures import ranks_option, rounds_option, spread
from spmd_engine.cli.bench.launch import as_arguments, launch


@click.command(short_help="Seconds from the launch of ranks to the end of a run of one step.")
@ranks_option(8)
@rounds_option()
def start(ranks: int, rounds: int) -> None:
    """Time the whole of 'train --steps 1', the reading of its data and the writing of its checkpoint included."""
    seconds = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            options = {"steps": 1, "eval_every": 0, "eval_samples": 1, "sample": 0, "batch_size": ranks}
            began = perf_counter()
            launch(ranks, ["spmd_engine", "train", *as_arguments({**options, "run": f"{folder}/run"})])
            seconds.append(perf_counter() - began)
    click.echo(f"{ranks} ranks, from the launch to the end of a run of one step: {spread(seconds, unit=' s')}")
