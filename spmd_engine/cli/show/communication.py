"""``show communication``: what a rank sends in a step, when it begins, and what computes meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from spmd_engine.cli.composition import composition_of, composition_options
from spmd_engine.cli.config_file import config_option
from spmd_engine.cli.options import image_shape, images_option
from spmd_engine.cli.show.options import mesh_option, model_option, output_option
from spmd_engine.cli.show.output import present
from spmd_engine.cli.show.picture import BLUE, GREEN, ORANGE, PURPLE, YELLOW, Cell, Picture, table, text
from spmd_engine.comm.mesh import parse_axes
from spmd_engine.comm.mesh_position import MeshPosition, all_positions
from spmd_engine.engine.composition import Composition
from spmd_engine.engine.dry_run import Communication, DryRun, dry_run
from spmd_engine.engine.plan import PIPE, make_plan
from spmd_engine.engine.recompute import Recompute, segments
from spmd_engine.errors import UsageError
from spmd_engine.models import Model, layout_for
from spmd_engine.models.names import build_model

FILLS = {
    "all_gather": BLUE,
    "reduce_scatter": ORANGE,
    "all_reduce": YELLOW,
    "send": GREEN,
    "receive": PURPLE,
}
LABEL = 34  # columns for the names of transfers
MOST = 400  # transfers


@click.command(short_help="What a rank sends in a step, and when.")
@config_option
@model_option
@images_option
@mesh_option
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Of the mesh.")
@click.option("--micro-batches", type=click.IntRange(1, 64), default=1, show_default=True, help="Of a step.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@composition_options
@output_option
def communication(
    model: str,
    images: str | None,
    mesh: str,
    rank: int,
    micro_batches: int,
    dtype: str,
    output: Path | None,
    **options: Any,
) -> None:
    """Draw one rank's step: a column a computation of a layer, and below them a bar for each transfer of parameters,
    gradients and a pipeline's activations, from where it begins to where it is waited for.

    What layers exchange among themselves (tensor, sequence and context parallel) is part of their computations.

    \b
      python -m spmd_engine show communication --model gpt-nano --mesh data=4
      python -m spmd_engine show communication --model gpt-nano --mesh data=4 --zero 3
      python -m spmd_engine show communication --mesh pipe=2,data=2 --micro-batches 2 --schedule zero-bubble
    """
    axes = parse_axes(mesh)
    built = build_model(model, sample=image_shape(model, images), recut_after=options["recut_after"])
    itemsize = np.dtype(dtype).itemsize
    composition = composition_of(options, axes, built)
    places = all_positions(axes)
    if rank >= len(places):
        raise UsageError(f"--rank {rank} with --mesh {mesh}: ranks are from 0 to {len(places) - 1}")
    step = step_of(built, places[rank], composition, micro_batches, itemsize)
    present(draw_communication(step, f"{model}, mesh {mesh}: a step of rank {rank}", itemsize), output)


def step_of(model: Model, place: MeshPosition, composition: Composition, micro_batches: int, itemsize: int) -> DryRun:
    """The step of the rank at ``place`` under a composition."""
    stages, stage = place.axes.get(PIPE, 1), place.coordinates.get(PIPE, 0)
    schedule, storage = composition.schedule_on(place.axes), composition.storage
    plan = make_plan(
        model,
        place,
        layout_for(
            model, place, sequence_parallel=composition.sequence_parallel, experts_over=composition.expert_axes
        ),
        itemsize,
        storage=storage,
        stages=composition.division,
        chunks_per_stage=schedule.chunks,
    )
    recompute = Recompute(composition.recompute)
    return dry_run(
        plan,
        [layer for layer, _ in model.layers],
        schedule.program(stages, micro_batches, stage),
        {number: segments(model, plan.chunks[number], recompute) for number in plan.mine},
        place=place,
        zero=storage.stage(place.axes),
        micro_batches=micro_batches,
        dtype=f"f{itemsize}",
        compress=storage.compress,
    )


def draw_communication(step: DryRun, title: str, itemsize: int) -> Picture:
    """Columns are computations, numbered from 0; the table below names those where a transfer begins and ends."""
    if len(step.communications) > MOST:
        count = len(step.communications)
        raise UsageError(f"{count} transfers are too many to draw; take a smaller model, or fewer parts")
    cells = [text(0, 0, "computation")]
    cells += [text(LABEL + at, 0, str(at)) for at in range(0, len(step.computations) + 1, 10)]
    for line, transfer in enumerate(step.communications, 1):
        cells.append(text(0, line, f"{transfer.operation} {transfer.what}"[: LABEL - 1]))
        width = max(transfer.priority, 1)
        bar = Cell(LABEL + transfer.begins, line, width, 1, "=" * width, FILLS[transfer.operation], False, "left")
        cells.append(bar)
    moved = sum(transfer.elements for transfer in step.communications) * itemsize
    exposed = [transfer for transfer in step.communications if transfer.priority == 0]
    notes = [
        f"{len(step.computations)} computations, {len(step.communications)} transfers of {moved:,} bytes of whole "
        f"groups; {len(exposed)} have nothing to hide behind.",
        "What layers exchange among themselves is part of their computations; a pipeline's bytes depend on samples.",
        "Hidden by: computations between where a transfer begins and where it is waited for. Fewer are more urgent.",
    ]
    rows = [("transfer", "over", "bytes", "begins before", "is waited for before", "hidden by")]
    rows += [_row(step, transfer, itemsize) for transfer in step.communications]
    return Picture(title, cells, table(rows, "llrllr"), notes, fold=(LABEL, 10))


def _row(step: DryRun, transfer: Communication, itemsize: int) -> tuple[str, ...]:
    names = [*(f"{number} {name}" for number, name in enumerate(step.computations)), "the end"]
    begins, ends = names[transfer.begins], names[transfer.begins + transfer.priority]
    size = f"{transfer.elements * itemsize:,}" if transfer.elements else ""
    what = f"{transfer.operation} {transfer.what}"
    return what, ",".join(transfer.over), size, begins, ends, str(transfer.priority)
