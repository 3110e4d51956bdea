"""``show schedule`` and ``show communication``: what a pipeline's stages and a rank do in a step, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from spmd_engine.axes import MeshPosition, all_positions
from spmd_engine.cli.options import axes_of, model_on, takes_job
from spmd_engine.cli.show.picture import output_option, present
from spmd_engine.engine.schedules.orders import named
from spmd_engine.errors import UsageError
from spmd_engine.pictures import BLUE, GREEN, ORANGE, PALE, PURPLE, SKY, YELLOW, Cell, Picture, listed, table, text
from spmd_engine.planning import analyze
from spmd_engine.planning.dry_run.step_analysis import Communication, RankStep
from spmd_engine.training.train_config import TrainConfig

# --- ``show schedule``: when each stage of a pipeline computes, and when it is idle


@click.command(short_help="The timeline of a pipeline's schedule.")
@click.argument("name", metavar="SCHEDULE")
@click.option("--stages", type=click.IntRange(1, 64), default=4, show_default=True, help="Of the pipeline.")
@click.option("--micro-batches", type=click.IntRange(1, 512), default=8, show_default=True, help="Of a step.")
@click.option("--chunks", type=click.IntRange(1, 16), help="Chunks of layers a stage. [default: 2 if interleaved]")
@output_option
def schedule(name: str, stages: int, micro_batches: int, chunks: int | None, output: Path | None) -> None:
    """Draw stage by time what a schedule computes: F forward, B backward, or its parts, I for the input and W for the
    weights, each with the number of the micro-batch; chunks of layers have small letters.

    A forward, an input part and a weight part each take one unit of time a stage, and transfers none. Below are the
    bubble, which is the idle part of all stages' time, and how many micro-batches' activations a stage holds at most.

    \b
      python -m spmd_engine show schedule 1f1b --stages 4 --micro-batches 8
      python -m spmd_engine show schedule interleaved --stages 4 --micro-batches 8 --chunks 2
      python -m spmd_engine show schedule zero-bubble --stages 4 --micro-batches 8 --output zero-bubble.svg

    SCHEDULE is naive, gpipe, 1f1b, interleaved, zero-bubble or zero-bubble-h2.
    """
    present(named(name, chunks).picture(stages, micro_batches), output)


# --- ``show communication``: what a rank sends in a step, and the computations that overlap with it


FILLS = {
    "all_gather": BLUE,
    "reduce_scatter": ORANGE,
    "all_reduce": YELLOW,
    "all_to_all": SKY,
    "send": GREEN,
    "receive": PURPLE,
}
LABEL = 40  # columns for the names of transfers
MOST_TRANSFERS = 400  # transfers
MOST_PARTS = 64  # micro-batches


@click.command(short_help="What a rank sends in a step, and when.")
@takes_job(
    *("model", "images", "precision", "mixture", "composition", "batch_size", "micro_batches"),
    described=True,
    defaults={"batch_size": 16},
)
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="The rank to draw.")
@output_option
def communication(job: TrainConfig, rank: int, output: Path | None) -> None:
    """Draw one rank's step: a column for each computation, and below a bar for each collective and message, from its
    start to the computation that waits for it.

    A layer that communicates in its middle is several computations with one name.

    \b
      python -m spmd_engine show communication --model gpt-nano --mesh data=4
      python -m spmd_engine show communication --model gpt-nano --mesh data=2,model=2 --zero 3
      python -m spmd_engine show communication --mesh pipe=2,data=2 --micro-batches 2 --schedule zero-bubble
    """
    axes = axes_of(job)
    mesh = all_positions(axes)
    if rank >= len(mesh):
        raise UsageError(f"--rank {rank} with --mesh {mesh[0]}: ranks are from 0 to {len(mesh) - 1}")
    if job.data.micro_batches > MOST_PARTS:
        raise UsageError(f"--micro-batches {job.data.micro_batches}: at most {MOST_PARTS} can be drawn")
    model, composition = model_on(axes, job)
    data, dtype = job.data, job.model.dtype
    analysis = analyze(
        model, axes, composition, batch_size=data.batch_size, micro_batches=data.micro_batches, dtype=dtype
    )
    title = f"{job.model.name}, mesh {mesh[0]}: a step of rank {rank}"
    present(draw_communication(analysis.of_rank(rank), mesh[rank], title, analysis.approximate), output)


def draw_communication(step: RankStep, place: MeshPosition, title: str, assumed: Sequence[str] = ()) -> Picture:
    """Columns are computations, numbered from 0; the table below names those where a transfer begins and ends, and the
    ranks at the other ends. ``place`` is the rank's."""
    if len(step.communications) > MOST_TRANSFERS:
        count = len(step.communications)
        raise UsageError(f"{count} transfers are too many to draw; choose a smaller model or fewer micro-batches")
    cells = [text(0, 0, "computation")]
    cells += [text(LABEL + at, 0, str(at)) for at in range(0, len(step.computations) + 1, 10)]
    for line, transfer in enumerate(step.communications, 1):
        cells.append(text(0, line, _name_of_transfer(transfer)[: LABEL - 1]))
        width = max(transfer.priority, 1)
        fill = FILLS.get(transfer.operation, PALE)
        cells.append(Cell(LABEL + transfer.begins, line, width, 1, "=" * width, fill, False, "left"))
    exposed = [transfer for transfer in step.communications if transfer.priority == 0]
    notes = [
        f"{len(step.computations)} computations; {len(step.communications)} collectives and messages send "
        f"{round(step.bytes_sent):,} bytes; {len(exposed)} overlap with no computation.",
        "Hidden by: computations between the start of a transfer and the wait for it. This is its priority: of "
        "transfers that wait for a link, the simulation of plan begins the one with the fewest.",
        *assumed,
    ]
    rows = [("transfer", "over", "with ranks", "bytes sent", "begins before", "is waited for before", "hidden by")]
    rows += [_row_of_transfer(step, place, transfer) for transfer in step.communications]
    return Picture(title, cells, table(rows, "lllrllr"), notes, fold=(LABEL, 10))


def _name_of_transfer(transfer: Communication) -> str:
    return f"{transfer.operation} {transfer.label}"


def _row_of_transfer(step: RankStep, place: MeshPosition, transfer: Communication) -> tuple[str, ...]:
    ranks = [peer.index(None) for peer in place.peers([axis for axis in transfer.axes.split(",") if axis])]
    others = [rank for rank in ranks if rank != place.index(None)] if transfer.peer is None else [ranks[transfer.peer]]
    names = [*(f"{number} {computation.name}" for number, computation in enumerate(step.computations)), "the end"]
    begins, ends = names[transfer.begins], names[transfer.ends]
    name, sent = _name_of_transfer(transfer), f"{round(transfer.sent):,}"
    return name, transfer.axes, listed(others), sent, begins, ends, str(transfer.priority)
