"""``analyze``: what every rank computes, sends and holds in a step, found without starting one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from spmd_engine.axes import all_positions, parse_axes
from spmd_engine.cli.adapters import adapted, lora_options
from spmd_engine.cli.analysis_text import describe, draw_memory_of_step
from spmd_engine.cli.composition import composition_of, composition_options, model_of
from spmd_engine.cli.config_file import config_option
from spmd_engine.cli.experts import expert_options
from spmd_engine.cli.options import images_option, model_option
from spmd_engine.cli.show.options import OPTIMIZERS, dtype_option, mesh_option, optimizer_option, output_option
from spmd_engine.cli.show.render import present, print_picture
from spmd_engine.errors import UsageError
from spmd_engine.planning import analyze as analyze_step
from spmd_engine.runtime.launchers import launcher_rank

WIDTH = 240  # columns that a table may have, however narrow the terminal is: a number whose end is cut off is none


@click.command(short_help="Compute, bytes and memory of a step, rank by rank, before one is started.")
@config_option
@model_option
@images_option
@mesh_option
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True, help="Samples, over all ranks.")
@click.option("--micro-batches", type=click.IntRange(1), default=1, show_default=True)
@click.option("--sequence", type=click.IntRange(1), help="Length of samples. [default: the model's context]")
@dtype_option
@optimizer_option
@click.option("--rank", type=click.IntRange(0), help="Whose step is told. [default: the one that holds most]")
@click.option("--json", "as_json", is_flag=True, help="Everything, of every class of ranks, as JSON.")
@expert_options
@lora_options
@composition_options
@output_option
def analyze(
    model: str,
    images: str | None,
    mesh: str,
    batch_size: int,
    micro_batches: int,
    sequence: int | None,
    dtype: str,
    optimizer: str,
    rank: int | None,
    as_json: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """Run one training step on shapes alone: its FLOPs, bytes, calls and memory, layer by layer and moment by moment.

    It is the engine's own text that runs, so what is told is what ranks do: 'train' compares its first step with it,
    call by call. The picture is the memory of a rank over its step; --output writes it to a file.

    \b
      python -m spmd_engine analyze --model gpt2 --mesh data=4,model=2 --batch-size 8
      python -m spmd_engine analyze --model gpt2 --mesh pipe=4 --micro-batches 8 --rank 0 --output memory.svg
    """
    if launcher_rank() > 0:
        return
    axes = parse_axes(mesh)
    ranks = len(all_positions(axes))
    if rank is not None and rank >= ranks:
        raise UsageError(f"--rank {rank}: the mesh has ranks 0 to {ranks - 1}")
    built = adapted(model_of(model, images, options), model, options)
    analysis = analyze_step(
        built,
        axes,
        composition_of(options, axes, built),
        batch_size=batch_size,
        micro_batches=micro_batches,
        sequence=sequence,
        dtype=dtype,
        optimizer=OPTIMIZERS[optimizer](),
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
