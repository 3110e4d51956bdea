"""``bench collectives``: the engine's collectives beside the MPI library's own."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import click

from spmd_engine.cli.bench.measuring import measure, output_option, ranks_option, report, rounds_option

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


@click.command(short_help="Collectives, beside the MPI library's own.")
@ranks_option(2, least=2)
@rounds_option(15)
@click.option("--only", type=click.Choice(OPERATIONS), multiple=True, help="Only this operation; may be repeated.")
@click.option("--largest", type=click.IntRange(min=1), default=64, show_default=True, help="MiB of the largest arrays.")
@output_option()
def collectives(ranks: int, rounds: int, only: tuple[str, ...], largest: int, output: Path | None) -> None:
    """Time calls of 8 bytes and more, four ways in turn: the whole array counts, float32.

    "shared" has its arrays in memory that the node's ranks share (Mesh.empty), "ordinary" has NumPy's, both with checks
    and ledger; "unchecked" is ordinary with checks switched off; "library" is the MPI library's own blocking call on
    arrays made before. The last two columns are the median over rounds of the library's time divided by ours.
    """
    config = {
        "operations": only or OPERATIONS,
        "sizes": [8, *(1 << power for power in range(10, (largest << 20).bit_length(), 2))],
        "rounds": rounds,
    }
    found = measure(ranks, "calls", config)
    rows = []
    for each in found:
        seconds = each["seconds"]
        times = [f"{median(values) * 1e6:,.1f}" for values in seconds.values()]
        ratios = [_times_as_fast(seconds, way) for way in ("shared", "ordinary")]
        rows.append((each["operation"], f"{each['size']:,}", *times, *ratios))
    columns = ("operation", "bytes", "shared us", "ordinary us", "unchecked us", "library us", "shared", "ordinary")
    report(columns, rows, {"ranks": ranks, "results": found}, output)


def _times_as_fast(seconds: dict[str, list[float]], way: str) -> str:
    """How many times as fast as the library this way is."""
    ratios = [library / ours for library, ours in zip(seconds["library"], seconds[way], strict=True)]
    return f"{median(ratios):.2f}x"
