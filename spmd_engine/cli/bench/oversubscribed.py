"""``bench oversubscribed``: what it costs to run more ranks than there are cores."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import click

from spmd_engine.cli.bench.measuring import (
    measure,
    output_option,
    ranks_option,
    report,
    rounds_option,
    spread,
    steps_option,
)
from spmd_engine.comm.shared_memory.cores import cores_here


@click.command(
    short_help="More ranks than cores against as many as cores.",
    context_settings={"ignore_unknown_options": True},
)
@ranks_option(8, least=2)
@steps_option(12)
@rounds_option()
@output_option()
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def oversubscribed(ranks: int, steps: int, rounds: int, output: Path | None, options: tuple[str, ...]) -> None:
    """Ranks that wait must not spin: tokens a second on one rank a core and on more; options go to 'train'."""
    cores = max(1, int(cores_here()))
    arguments = {"options": ["--batch-size", "32", *options], "warm": 3, "time": steps}
    speeds: dict[int, list[float]] = {cores: [], ranks: []}
    for _ in range(rounds):
        for number, values in speeds.items():
            result = measure(number, "steps", arguments)
            values.append(result["tokens"] / median(result["seconds"]))
    ratios = [many / few for few, many in zip(*speeds.values(), strict=True)]
    rows = [(f"{number} ranks, targets a second", spread(values)) for number, values in speeds.items()]
    rows.append(("ratio", spread(ratios)))
    report((f"on {cores} cores", "median (range)"), rows, speeds, output)
