"""``bench oversubscribed``: what it costs to run more ranks than there are cores."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median

import click

from spmd_engine.cli.bench.launch import measure, print_table, spread


@click.command(
    short_help="More ranks than cores against as many as cores.",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--ranks", type=click.IntRange(min=2), default=8, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=12, show_default=True, help="Timed, in each round.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="A JSON file for all figures.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def oversubscribed(ranks: int, steps: int, rounds: int, output: Path | None, options: tuple[str, ...]) -> None:
    """Ranks that wait must not spin: tokens a second on one rank a core and on more; options go to 'train'."""
    cores = len(os.sched_getaffinity(0))
    arguments = {"options": ["--batch-size", "32", *options], "warm": 3, "time": steps}
    speeds: dict[int, list[float]] = {cores: [], ranks: []}
    for _ in range(rounds):
        for number, values in speeds.items():
            result = measure(number, "steps", arguments)
            values.append(result["tokens"] / median(result["seconds"]))
    ratios = [many / few for few, many in zip(*speeds.values(), strict=True)]
    rows = [(f"{number} ranks, targets a second", spread(values)) for number, values in speeds.items()]
    print_table((f"on {cores} cores", "median (range)"), [*rows, ("ratio", spread(ratios))])
    if output:
        output.write_text(json.dumps(speeds, indent=1) + "\n")
