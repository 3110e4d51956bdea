"""``analyze``: what every rank computes, sends and holds in a step, without starting a rank."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from spmd_engine.axes import all_positions
from spmd_engine.cli.options import LongCommand, axes_of, model_on, output_option, present, takes_job
from spmd_engine.cli.values import WholeRange
from spmd_engine.engine.batch import check_batch
from spmd_engine.engine.build import composed_layout
from spmd_engine.errors import UsageError
from spmd_engine.observability.step import draw_memory_of_step, print_shards, print_step
from spmd_engine.planning import Samples, analyze_engine
from spmd_engine.planning import analyze as analyze_step
from spmd_engine.planning.dry_run.model_shards import model_shards
from spmd_engine.planning.machine.machine import read_machine
from spmd_engine.planning.search.placement import annealed, tasks_of
from spmd_engine.training import TrainConfig
from spmd_engine.training.data.array_file import read_arrays
from spmd_engine.training.workload import optimizer_of, step_of

WIDTH = 240  # columns of tables, so that no number is truncated on narrow terminals


@click.command(cls=LongCommand, short_help="Compute, bytes and memory of a step, rank by rank, before one is started.")
@takes_job(
    *("model", "images", "precision", "mixture", "lora", "composition"),
    *("batch_size", "micro_batches", "length", "optimizer", "device", "data"),
    described=True,
    defaults={"batch_size": 16},
    help={
        "device": "Whose code is analyzed: cuda (CuPy) counts launches, waits and copies too, without a GPU.",
        "data": "For an engine of your own: an .npz file, from whose arrays x and y the shapes of samples are read.",
    },
)
@click.option("--rank", type=WholeRange(0), help="The rank to describe. [default: the one that holds most]")
@click.option("--shards", is_flag=True, help="List instead what each rank computes, holds and sends for its layers.")
@click.option("--machine", metavar="NAME|FILE", help="With --shards: place the ranks on the nodes of this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print everything, of every class of ranks, as JSON.")
@output_option
def analyze(
    job: TrainConfig, rank: int | None, shards: bool, machine: str | None, as_json: bool, output: Path | None
) -> None:
    """Run one training step on shapes alone: its FLOPs, bytes, calls and memory, by layer and over time.

    The analysis runs the engine's own code, so it gives what ranks do: 'train' compares its first step with it, call by
    call. The picture shows the memory of a rank over its step; --output writes it to a file.

    \b
      python -m spmd_engine analyze --model gpt2 --mesh data=4,model=2 --batch-size 8
      python -m spmd_engine analyze --model gpt2 --mesh pipe=4 --micro-batches 8 --rank 0 --output memory.svg
      python -m spmd_engine analyze --model gpt2 --mesh data=2,pipe=2 --shards --machine nodes.toml
    """
    axes = axes_of(job)
    ranks = len(all_positions(axes)) + len(job.composition.ranks_outside)
    if rank is not None and rank >= ranks:
        raise UsageError(f"--rank {rank}: the job has ranks 0 to {ranks - 1}")
    if machine is not None and not shards:
        raise UsageError(f"--machine {machine}: add --shards, which are placed on its nodes")
    if shards and job.composition.assigned:
        raise UsageError(
            f"--shards with --assign {job.composition.assign}: a helper rank has no shard; omit one of them"
        )
    if (make := job.model.engine) is not None:
        if job.device != "cpu":
            raise UsageError(f"--device {job.device}: {job.model.name} is an engine of your own; analyze it on cpu")
        analysis = analyze_engine(make, axes, _samples(job), optimizer=optimizer_of(job.training))
    else:
        model, composition = model_on(axes, job)
        position = all_positions(axes)[0]
        spec = composed_layout(model, position, composition).spec(model.inputs)
        check_batch(job.data.batch_size, job.data.micro_batches, spec, position)
        analysis = analyze_step(model, axes, composition, device=job.device, **step_of(job))
    console = Console(highlight=False, width=WIDTH, soft_wrap=True)
    if shards:
        nodes = read_machine(machine).with_ranks(ranks).capabilities(job.model.dtype) if machine is not None else []
        listed = model_shards(analysis)
        if as_json:
            places = annealed(tasks_of(listed, nodes)) if nodes else ()
            shown = {"shards": list(map(asdict, listed)), "nodes": list(map(asdict, nodes)), "places": places}
            click.echo(json.dumps(shown))
        else:
            print_shards(listed, nodes, console)
        return
    if as_json:
        click.echo(json.dumps(analysis.as_json(), default=str))
        return
    peaks = analysis.peak_bytes_by_rank()
    rank = peaks.index(max(peaks)) if rank is None else rank
    picture = draw_memory_of_step(analysis, rank)
    print_step(analysis, rank, console)
    present(picture, output, console)


def _samples(job: TrainConfig) -> Samples:
    """The shapes of the samples that the engine of a job learns from."""
    if not job.data.path:
        raise UsageError(f"{job.model.name} is an engine of your own: give --data FILE.npz, with arrays x and y")
    arrays = read_arrays(str(job.data.path))
    (inputs, tokens), (targets, classes) = (
        (x.shape[1:], int(x.max()) + 1 if x.dtype.kind in "iu" else 0) for x in (arrays["x"], arrays["y"])
    )
    sizes = job.data.batch_size, job.data.micro_batches
    return Samples(inputs, targets, *sizes, job.model.dtype, classes, tokens)
