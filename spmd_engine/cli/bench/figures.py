"""What all benchmarks have alike: their options, and figures as medians with ranges, in a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from spmd_engine.cli.output_file import check_ending
from spmd_engine.errors import UsageError

Option = Callable[[Callable], Callable]


def ranks_option(default: int, least: int = 1) -> Option:
    """``--ranks``"""
    return click.option("--ranks", type=click.IntRange(min=least), default=default, show_default=True)


def steps_option(default: int) -> Option:
    """``--steps``"""
    steps = click.IntRange(min=1)
    return click.option("--steps", type=steps, default=default, show_default=True, help="Timed, in each round.")


def rounds_option(default: int = 3) -> Option:
    """``--rounds``"""
    return click.option("--rounds", type=click.IntRange(min=1), default=default, show_default=True)


def output_option() -> Option:
    """``--output``, which is looked at before anything is measured."""

    def check(_, __, output: Path | None) -> Path | None:
        if output and not output.parent.is_dir():
            raise UsageError(f"--output {output}: there is no such folder")
        if output:
            check_ending("--output", output, ".json")
        return output

    path = click.Path(path_type=Path, dir_okay=False)
    return click.option("--output", type=path, callback=check, help="A JSON file for all figures.")


def report(columns: Sequence[str], rows: Sequence[Sequence[str]], figures: Any, output: Path | None) -> None:
    """Print the table, and write all ``figures`` to ``output``."""
    print_table(columns, rows)
    if output:
        output.write_text(json.dumps(figures, indent=1) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table that reads well in a pipe, too: numbers to the right."""
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.width = max(console.width, 140)
    console.print(table)


def spread(values: Sequence[float], scale: float = 1.0, unit: str = "") -> str:
    """The median, and the range."""
    low, high = min(values) * scale, max(values) * scale
    return f"{median(values) * scale:,.4g}{unit} ({low:,.4g}-{high:,.4g})"
