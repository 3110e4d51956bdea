"""``show communication``: what a rank sends in a step, when it begins, and what computes meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spmd_engine.axes import all_positions, parse_axes
from spmd_engine.cli.composition import composition_of, composition_options, model_of
from spmd_engine.cli.config_file import config_option
from spmd_engine.cli.experts import expert_options
from spmd_engine.cli.options import images_option, model_option
from spmd_engine.cli.show.options import dtype_option, mesh_option, output_option
from spmd_engine.cli.show.picture import BLUE, GREEN, ORANGE, PALE, PURPLE, SKY, YELLOW, Cell, Picture, table, text
from spmd_engine.cli.show.render import present
from spmd_engine.errors import UsageError
from spmd_engine.planning import analyze
from spmd_engine.planning.dry_run.step_analysis import Communication, RankStep

FILLS = {
    "all_gather": BLUE,
    "reduce_scatter": ORANGE,
    "all_reduce": YELLOW,
    "all_to_all": SKY,
    "send": GREEN,
    "receive": PURPLE,
}
LABEL = 40  # columns for the names of transfers
MOST = 400  # transfers


@click.command(short_help="What a rank sends in a step, and when.")
@config_option
@model_option
@images_option
@mesh_option
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Of the mesh.")
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True, help="Samples, over all ranks.")
@click.option("--micro-batches", type=click.IntRange(1, 64), default=1, show_default=True, help="Of a step.")
@dtype_option
@expert_options
@composition_options
@output_option
def communication(
    model: str,
    images: str | None,
    mesh: str,
    rank: int,
    batch_size: int,
    micro_batches: int,
    dtype: str,
    output: Path | None,
    **options: Any,
) -> None:
    """Draw one rank's step: a column a computation, and below them a bar for each collective and message, from where
    it begins to where it is waited for.

    A layer that communicates half-way is several computations of one name.

    \b
      python -m spmd_engine show communication --model gpt-nano --mesh data=4
      python -m spmd_engine show communication --model gpt-nano --mesh data=2,model=2 --zero 3
      python -m spmd_engine show communication --mesh pipe=2,data=2 --micro-batches 2 --schedule zero-bubble
    """
    axes = parse_axes(mesh)
    ranks = len(all_positions(axes))
    if rank >= ranks:
        raise UsageError(f"--rank {rank} with --mesh {mesh}: ranks are from 0 to {ranks - 1}")
    built = model_of(model, images, options)
    composition = composition_of(options, axes, built)
    sizes = {"batch_size": batch_size, "micro_batches": micro_batches}
    analysis = analyze(built, axes, composition, dtype=dtype, **sizes)
    step = analysis.of_rank(rank)
    title = f"{model}, mesh {mesh}: a step of rank {rank}"
    present(draw_communication(step, title, analysis.approximate), output)


def draw_communication(step: RankStep, title: str, assumed: tuple[str, ...] = ()) -> Picture:
    """Columns are computations, numbered from 0; the table below names those where a transfer begins and ends."""
    if len(step.communications) > MOST:
        count = len(step.communications)
        raise UsageError(f"{count} transfers are too many to draw; take a smaller model, or fewer parts")
    cells = [text(0, 0, "computation")]
    cells += [text(LABEL + at, 0, str(at)) for at in range(0, len(step.computations) + 1, 10)]
    for line, transfer in enumerate(step.communications, 1):
        cells.append(text(0, line, _name(transfer)[: LABEL - 1]))
        width = max(transfer.priority, 1)
        fill = FILLS.get(transfer.operation, PALE)
        cells.append(Cell(LABEL + transfer.begins, line, width, 1, "=" * width, fill, False, "left"))
    exposed = [transfer for transfer in step.communications if transfer.priority == 0]
    notes = [
        f"{len(step.computations)} computations; {len(step.communications)} collectives and messages send "
        f"{round(step.bytes_sent):,} bytes; {len(exposed)} have nothing to hide behind.",
        "Hidden by: computations between where a transfer begins and where it is waited for. Fewer are more urgent.",
        *assumed,
    ]
    rows = [("transfer", "over", "bytes sent", "begins before", "is waited for before", "hidden by")]
    rows += [_row(step, transfer) for transfer in step.communications]
    return Picture(title, cells, table(rows, "llrllr"), notes, fold=(LABEL, 10))


def _name(transfer: Communication) -> str:
    return f"{transfer.operation} {transfer.label}"


def _row(step: RankStep, transfer: Communication) -> tuple[str, ...]:
    names = [*(f"{number} {each.name}" for number, each in enumerate(step.computations)), "the end"]
    begins, ends = names[transfer.begins], names[transfer.ends]
    return _name(transfer), transfer.axes, f"{round(transfer.sent):,}", begins, ends, str(transfer.priority)
