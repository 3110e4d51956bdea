"""``analyze``: what every rank computes, sends and holds in a step, without starting a rank."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from spmd_engine.axes import all_positions
from spmd_engine.cli.options import axes_of, model_on, takes_job
from spmd_engine.cli.show.picture import output_option, present, print_picture
from spmd_engine.engine.helpers import helper_ranks
from spmd_engine.engine.optimizers import OPTIMIZERS
from spmd_engine.errors import UsageError
from spmd_engine.pictures import BLUE, GREEN, ORANGE, PALE, PURPLE, SKY, VERMILLION, YELLOW, Cell, Picture, table, text
from spmd_engine.planning import RankStep, Samples, StepAnalysis, analyze_engine
from spmd_engine.planning import analyze as analyze_step
from spmd_engine.planning.dry_run.model_shards import ModelShard, model_shards
from spmd_engine.planning.dry_run.step_analysis import KINDS, Phases, critical_path
from spmd_engine.planning.machine.files import read_machine
from spmd_engine.planning.machine.machine import NodeCapabilities
from spmd_engine.planning.search.placement import annealed, tasks_of
from spmd_engine.runtime.launchers import launcher_rank
from spmd_engine.training.data.array_file import read_arrays
from spmd_engine.training.train_config import TrainConfig
from spmd_engine.units import readable_bytes, readable_seconds

WIDTH = 240  # columns of tables, so that no number is truncated on narrow terminals


@click.command(short_help="Compute, bytes and memory of a step, rank by rank, before one is started.")
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
@click.option("--rank", type=click.IntRange(0), help="The rank to describe. [default: the one that holds most]")
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
    if launcher_rank() > 0:
        return
    axes = axes_of(job)
    ranks = len(all_positions(axes)) + len(helper_ranks(job.composition.assigned))
    if rank is not None and rank >= ranks:
        raise UsageError(f"--rank {rank}: the job has ranks 0 to {ranks - 1}")
    if machine is not None and not shards:
        raise UsageError(f"--machine {machine}: add --shards, which are placed on its nodes")
    if shards and job.composition.assigned:
        raise UsageError(
            f"--shards with --assign {job.composition.assign}: a helper rank has no shard; omit one of them"
        )
    optimizer = OPTIMIZERS[job.training.optimizer]()
    if (make := job.model.engine) is not None:
        if job.device != "cpu":
            raise UsageError(f"--device {job.device}: {job.model.name} is an engine of your own; analyze it on cpu")
        analysis = analyze_engine(make, axes, _samples(job), optimizer=optimizer)
    else:
        model, composition = model_on(axes, job)
        analysis = analyze_step(
            model,
            axes,
            composition,
            batch_size=job.data.batch_size,
            micro_batches=job.data.micro_batches,
            sequence=job.data.length,
            dtype=job.model.dtype,
            optimizer=optimizer,
            device=job.device,
        )
    if shards:
        nodes = read_machine(machine).with_ranks(ranks).capabilities(job.model.dtype) if machine is not None else []
        list_shards(model_shards(analysis), nodes, as_json)
        return
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


# --- The shards of all ranks, and their nodes


def list_shards(shards: Sequence[ModelShard], nodes: Sequence[NodeCapabilities], as_json: bool) -> None:
    """Print the shards of all ranks and, if there are ``nodes``, the best placement of the ranks on them."""
    tasks = tasks_of(shards, nodes) if nodes else None
    places = annealed(tasks) if tasks is not None else ()
    if as_json:
        shown = {"shards": [asdict(shard) for shard in shards], "nodes": [asdict(node) for node in nodes]}
        click.echo(json.dumps(shown | {"places": places}))
        return
    heads = ("bytes", "GFLOP", "activations", "bytes sent")
    listed = Table(box=None, pad_edge=False)
    for head in ("shard", "sharded", "layers"):
        listed.add_column(head)
    for head in heads:
        listed.add_column(head, justify="right")
    for head in ("sends to", "depends on", *(["node"] if places else [])):
        listed.add_column(head)
    for number, shard in enumerate(shards):
        ends = [shard.layers[0], shard.layers[-1]] if shard.layers else []
        layers = f"{' to '.join(dict.fromkeys(ends))} ({len(shard.layers)})" if ends else "-"
        sent = sum(point.bytes for point in shard.communication)
        receivers = sorted({other for point in shard.communication for other in point.shards})
        counts = f"{shard.bytes:,}", f"{shard.flops / 1e9:,.3f}", f"{shard.activations:,}", f"{sent:,.0f}"
        node = [str(places[number])] if places else []
        listed.add_row(shard.id, shard.kind, layers, *counts, _ids(receivers), _ids(shard.depends_on), *node)
    console = Console(highlight=False, width=WIDTH, soft_wrap=True)
    console.print(listed)
    for node in nodes:
        console.print(
            f"node {node.node}: {node.name} ({node.kind}), {node.ranks} ranks, {node.compute / 1e9:,.4g} GFLOP/s, "
            f"{readable_bytes(node.memory)}, {readable_bytes(node.bandwidth)}/s to other nodes"
        )
    if tasks is not None:
        in_order = [node.node for node in nodes for _ in range(node.ranks)]
        order = tuple(in_order[shard.rank] for shard in shards)
        console.print(
            f"products and messages of a step: {readable_seconds(tasks.cost(places))} on these nodes, "
            f"{readable_seconds(tasks.cost(order))} if ranks fill nodes in order"
        )


def _ids(ids: Sequence[str], most: int = 6) -> str:
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return (", ".join(ids[:most]) + more) or "-"


# --- Tables of layers and communication, and the contents of the peak


_PHASES = (Phases.FORWARD, Phases.RECOMPUTED, Phases.BACKWARD_INPUT, Phases.BACKWARD_WEIGHTS)
_MOST_HELD = 10


def describe(analysis: StepAnalysis, rank: int, console: Console) -> None:
    """Print the step of one rank, and the totals of all ranks."""
    step = analysis.of_rank(rank)
    where = ", ".join(f"{axis} {place}" for axis, place in step.coordinates.items())
    where = f"the rank at {where}" if where else "a helper rank"
    console.print(
        f"{analysis.model}: {analysis.parameters:,} parameters on {analysis.ranks} ranks, "
        f"{len(analysis.classes)} classes of equal ranks"
    )
    console.print(
        f"a step of all ranks: {analysis.flops / 1e9:,.2f} GFLOP in matrix products, {analysis.calls:,} calls, "
        f"{analysis.bytes_sent:,} bytes sent"
    )
    if step.launches:
        console.print(
            f"rank {rank} launches {step.launches:,} kernels, waits {step.waits:,} times for its device, besides "
            f"communication, and copies {step.copies:,} arrays to it"
        )
    console.print(f"largest peak {analysis.peak_bytes:,} bytes; below: rank {rank} (as {where})\n")
    console.print(_layers(step))
    console.print(_totals(analysis))
    path = critical_path(analysis)
    console.print(
        f"critical path: {path.flops / 1e9:,.2f} GFLOP in {len(path.nodes):,} computations, through "
        f"{len(path.classes):,} ranks in turn; this rank computes {step.flops / 1e9:,.2f}\n"
    )
    console.print(f"at its peak, in {_peak_computation(step)}, this rank holds {step.peak.bytes:,} bytes:")
    for kind, name, size in step.peak.holds[:_MOST_HELD]:
        console.print(f"  {size:>15,}  {kind}{f': {name}' if name else ''}")
    if tables := analysis.tables_of_rank(rank):
        console.print(f"and {tables:,} bytes of slot tables throughout the step")
    for note in analysis.approximate:
        console.print(f"assumed: {note}")


def _peak_computation(step: RankStep) -> str:
    name = step.computations[step.peak.computation].name if step.computations else "nothing"
    m = step.computations[step.peak.computation].micro_batch if step.computations else None
    return f"{name}{f' of micro-batch {m}' if m is not None else ''}"


def _layers(step: RankStep) -> Table:
    """A table with a row for each layer, or for several layers with equal numbers."""
    flops: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    sent: dict[str, float] = defaultdict(float)
    bytes_moved: dict[str, int] = defaultdict(int)
    for computation in step.computations:
        flops[computation.layer][computation.phase] += computation.flops
        bytes_moved[computation.layer] += computation.bytes_read + computation.bytes_written
    for communication in step.communications:
        sent[communication.label] += communication.sent
    held: dict[str, int] = defaultdict(int)
    for shard in step.shards:
        held[shard.layers[0] if shard.layers else ""] += shard.bytes
    lines: list[tuple[list[str], tuple[str, ...]]] = []
    for layer in flops:
        if not layer:
            continue
        largest = max((size for name, size in step.temporaries.items() if name.startswith(f"{layer} ")), default=0)
        numbers = (
            f"{held[layer]:,}",
            *(f"{flops[layer][phase] / 1e9:,.3f}" for phase in _PHASES),
            f"{bytes_moved[layer]:,}",
            f"{step.saved.get(layer, 0):,}",
            f"{largest:,}",
            f"{sent[layer]:,.0f}",
        )
        equal_layers = next((names for names, other in lines if other == numbers), None)
        if equal_layers is None:
            lines.append(([layer], numbers))
        else:
            equal_layers.append(layer)
    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    heads = ("parameters, bytes", "forward, GFLOP", "again", "input", "weights", "bytes moved", "saved", "most")
    for head in (*heads, "bytes sent"):
        table.add_column(head, justify="right")
    for names, numbers in lines:
        table.add_row(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} alike", *numbers)
    return table


def _totals(analysis: StepAnalysis) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left", title="\nall ranks together")
    table.add_column("operation")
    table.add_column("over")
    for head in ("calls", "bytes sent"):
        table.add_column(head, justify="right")
    for (operation, axes), (calls, sent) in sorted(analysis.totals().items()):
        table.add_row(operation, axes, f"{calls:,}", f"{sent:,}")
    return table


# --- A picture of a rank's memory over a step, by kind of array


#: A letter and a colour for each kind.
LOOKS = {
    "parameters": ("P", BLUE),
    "gradients": ("G", ORANGE),
    "optimizer state": ("O", GREEN),
    "gathered groups": ("g", PURPLE),
    "whole gradients": ("w", YELLOW),
    "activations": ("a", SKY),
    "communication buffers": ("c", VERMILLION),
    "temporaries": ("t", PALE),
}
_COLUMNS, _LINES = 96, 16


def draw_memory_of_step(analysis: StepAnalysis, rank: int) -> Picture:
    """Memory over the step: a column shows the moment with the largest total among those that it covers."""
    step = analysis.of_rank(rank)
    moments = list(step.timeline)
    columns = min(_COLUMNS, len(moments))
    most = max((moment.total for moment in moments), default=0)
    left = len(readable_bytes(most)) + 1
    cells: list[Cell] = [text(0, 0, readable_bytes(most)), text(0, _LINES - 1, "0".rjust(left - 1))]
    for column in range(columns):
        part = moments[column * len(moments) // columns : (column + 1) * len(moments) // columns]
        cells += _stack(max(part, key=lambda moment: moment.total).bytes_by_kind, left + column, most)
    rows = [("", "bytes at the peak", "between steps")]
    for kind in KINDS:
        peak, before = step.peak.bytes_by_kind.get(kind, 0), step.before.get(kind, 0)
        if peak or before:
            rows.append((f"({LOOKS[kind][0]}) {kind}", f"{peak:,}", f"{before:,}"))
    title = f"memory of rank {rank} over a step of {len(step.computations):,} computations, from left to right"
    return Picture(title, cells, table(rows, "lrr"))


def _stack(held, x: int, most: int) -> list[Cell]:
    """The cells of one column: a bar for each kind, the first kind at the bottom."""
    cells, below = [], 0
    for kind in KINDS:
        size = held.get(kind, 0)
        bottom, top = round(below * _LINES / most), round((below + size) * _LINES / most)
        below += size
        if top > bottom:
            height = top - bottom
            letter, fill = LOOKS[kind]
            cells.append(Cell(x, _LINES - top, 1, height, "\n".join(letter * height), fill, outline=False))
    return cells
