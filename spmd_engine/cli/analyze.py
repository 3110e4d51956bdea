"""``analyze``: what every rank computes, sends and holds in a step, found without starting one."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from spmd_engine.axes import all_positions
from spmd_engine.cli.analysis_text import describe, draw_memory_of_step
from spmd_engine.cli.options import axes_of, model_on, takes_job
from spmd_engine.cli.show.render import output_option, present, print_picture
from spmd_engine.engine.optimizers import OPTIMIZERS
from spmd_engine.errors import UsageError
from spmd_engine.planning import analyze as analyze_step
from spmd_engine.runtime.launchers import launcher_rank
from spmd_engine.training.train_config import TrainConfig

WIDTH = 240  # columns of a table at most, however narrow the terminal is, so that no number is cut off


@click.command(short_help="Compute, bytes and memory of a step, rank by rank, before one is started.")
@takes_job(
    *("model", "images", "dtype", "mixture", "lora", "composition"),
    *("batch_size", "micro_batches", "length", "optimizer"),
    described=True,
    defaults={"batch_size": 16},
)
@click.option("--rank", type=click.IntRange(0), help="The rank to describe. [default: the one that holds most]")
@click.option("--json", "as_json", is_flag=True, help="Print everything, of every class of ranks, as JSON.")
@output_option
def analyze(job: TrainConfig, rank: int | None, as_json: bool, output: Path | None) -> None:
    """Run one training step on shapes alone: its FLOPs, bytes, calls and memory, by layer and over time.

    The analysis runs the engine's own code, so it gives what ranks do: 'train' compares its first step with it, call by
    call. The picture shows the memory of a rank over its step; --output writes it to a file.

    \b
      python -m spmd_engine analyze --model gpt2 --mesh data=4,model=2 --batch-size 8
      python -m spmd_engine analyze --model gpt2 --mesh pipe=4 --micro-batches 8 --rank 0 --output memory.svg
    """
    if launcher_rank() > 0:
        return
    axes = axes_of(job)
    ranks = len(all_positions(axes))
    if rank is not None and rank >= ranks:
        raise UsageError(f"--rank {rank}: the mesh has ranks 0 to {ranks - 1}")
    model, composition = model_on(axes, job)
    analysis = analyze_step(
        model,
        axes,
        composition,
        batch_size=job.data.batch_size,
        micro_batches=job.data.micro_batches,
        sequence=job.data.length,
        dtype=job.model.dtype,
        optimizer=OPTIMIZERS[job.training.optimizer](),
    )
    if as_json:
        click.echo(json.dumps(analysis.as_json(), default=str))
        return
    peaks = analysis.peak_bytes_by_rank()
    rank = peaks.index(max(peaks)) if rank is None else rank
    picture = draw_memory_of_step(analysis, rank)
    console = Console(highlight=False, width=WIDTH, soft_wrap=True)
    describe(analysis, rank, console)
    if output is not None:
        present(picture, output)
    else:
        print_picture(picture, console)
