"""What ``analyze`` and ``show communication`` show of a step: computation, communication and memory of its ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

import spmd_engine.pictures as pictures
from spmd_engine.axes import MeshPosition
from spmd_engine.errors import UsageError, counted
from spmd_engine.observability.render import text_table
from spmd_engine.pictures import Cell, Picture, listed, table, text
from spmd_engine.planning.dry_run.model_shards import ModelShard
from spmd_engine.planning.dry_run.step_analysis import KINDS, Communication, Phases, RankStep, StepAnalysis
from spmd_engine.planning.machine.machine import NodeCapabilities
from spmd_engine.planning.search.placement import annealed, tasks_of
from spmd_engine.units import readable_bytes, readable_seconds

# --- ``show communication``: what a rank sends in a step, and the computations that overlap with it


FILLS = {
    "all_gather": pictures.BLUE,
    "reduce_scatter": pictures.ORANGE,
    "all_reduce": pictures.YELLOW,
    "all_to_all": pictures.SKY,
    "send": pictures.GREEN,
    "receive": pictures.PURPLE,
}
LABEL = 40  # columns for the names of transfers
MOST_TRANSFERS = 400  # transfers


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
        fill = FILLS.get(transfer.operation, pictures.PALE)
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


def print_transfers(step: RankStep, console: Console) -> None:
    """Print a summary of what a rank sends: a row for all transfers of one kind and label."""
    kinds: dict[tuple[str, str], list[Communication]] = defaultdict(list)
    for transfer in step.communications:
        kinds[_name_of_transfer(transfer), transfer.axes].append(transfer)
    rows = []
    for (name, axes), transfers in kinds.items():
        sent = sum(transfer.sent for transfer in transfers)
        hidden = sum(transfer.priority > 0 for transfer in transfers)
        rows.append((name, axes, str(len(transfers)), f"{sent:,.0f}", str(hidden)))
    heads = "transfers", "over", ">number", ">bytes sent", ">hidden by a computation"
    console.print(text_table(heads, rows, edge=False), "")


def _name_of_transfer(transfer: Communication) -> str:
    return f"{transfer.operation} {transfer.label}"


def _row_of_transfer(step: RankStep, place: MeshPosition, transfer: Communication) -> tuple[str, ...]:
    ranks = [peer.index(None) for peer in place.peers([axis for axis in transfer.axes.split(",") if axis])]
    others = [rank for rank in ranks if rank != place.index(None)] if transfer.peer is None else [ranks[transfer.peer]]
    names = [*(f"{number} {computation.name}" for number, computation in enumerate(step.computations)), "the end"]
    begins, ends = names[transfer.begins], names[transfer.ends]
    name, sent = _name_of_transfer(transfer), f"{round(transfer.sent):,}"
    return name, transfer.axes, listed(others), sent, begins, ends, str(transfer.priority)


# --- The shards of all ranks, and their nodes


def print_shards(shards: Sequence[ModelShard], nodes: Sequence[NodeCapabilities], console: Console) -> None:
    """Print the shards of all ranks and, if there are ``nodes``, the best placement of the ranks on them."""
    tasks = tasks_of(shards, nodes) if nodes else None
    places = annealed(tasks) if tasks is not None else ()
    counted = ">bytes", ">GFLOP", ">activations", ">bytes sent"
    heads = "shard", "sharded", "layers", *counted, "sends to", "depends on", *(["node"] if places else [])
    rows = []
    for number, shard in enumerate(shards):
        ends = [shard.layers[0], shard.layers[-1]] if shard.layers else []
        layers = f"{' to '.join(dict.fromkeys(ends))} ({len(shard.layers)})" if ends else "-"
        sent = sum(point.bytes for point in shard.communication)
        receivers = sorted({other for point in shard.communication for other in point.shards})
        counts = f"{shard.bytes:,}", f"{shard.flops / 1e9:,.3f}", f"{shard.activations:,}", f"{sent:,.0f}"
        node = [str(places[number])] if places else []
        rows.append((shard.id, shard.kind, layers, *counts, _ids(receivers), _ids(shard.depends_on), *node))
    console.print(text_table(heads, rows, edge=False))
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


def print_step(analysis: StepAnalysis, rank: int, console: Console) -> None:
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
    path = analysis.critical_path()
    console.print(
        f"critical path: {path.flops / 1e9:,.2f} GFLOP in {len(path.nodes):,} computations, through "
        f"{counted(len(path.classes), 'rank')} in turn; this rank computes {step.flops / 1e9:,.2f}\n"
    )
    console.print(f"at its peak, in {step.peak_moment}, this rank holds {step.peak.bytes:,} bytes:")
    for kind, name, size in step.peak.holds[:_MOST_HELD]:
        console.print(f"  {size:>15,}  {kind}{f': {name}' if name else ''}")
    if tables := analysis.tables_of_rank(rank):
        console.print(f"and {tables:,} bytes of slot tables throughout the step")
    for note in analysis.approximate:
        console.print(f"assumed: {note}")


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
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)  # layers, by their numbers
    for layer in flops:
        if not layer and len(flops) > 1:
            continue
        largest = max((size for name, size in step.temporaries.items() if name.startswith(f"{layer} ")), default=0)
        numbers = (
            f"{held[layer]:,}",
            *(f"{flops[layer][phase] / 1e9:,.3f}" for phase in _PHASES),
            f"{bytes_moved[layer]:,}",
            f"{step.saved.get(layer, 0):,}",
            f"{largest:,}",
            f"{sent[layer] if layer else sum(sent.values()):,.0f}",
        )
        alike[numbers].append(layer)
    gflop = ">forward, GFLOP", ">again", ">input", ">weights"
    heads = "layer", ">parameters, bytes", *gflop, ">bytes moved", ">saved", ">most", ">bytes sent"
    rows = []
    for numbers, (first, *more) in alike.items():
        name = first or "the engine"  # a user's own has no layers
        rows.append((f"{name} and {len(more)} alike" if more else name, *numbers))
    return text_table(heads, rows, edge=False)


def _totals(analysis: StepAnalysis) -> Table:
    totals = sorted(analysis.totals().items())
    rows = [(operation, axes, f"{calls:,}", f"{sent:,}") for (operation, axes), (calls, sent) in totals]
    heads = "operation", "over", ">calls", ">bytes sent"
    return text_table(heads, rows, "\nall ranks together", edge=False)


# --- A picture of a rank's memory over a step, by kind of array


#: A letter and a colour for each kind.
LOOKS = {
    "parameters": ("P", pictures.BLUE),
    "gradients": ("G", pictures.ORANGE),
    "optimizer state": ("O", pictures.GREEN),
    "gathered groups": ("g", pictures.PURPLE),
    "whole gradients": ("w", pictures.YELLOW),
    "activations": ("a", pictures.SKY),
    "communication buffers": ("c", pictures.VERMILLION),
    "temporaries": ("t", pictures.PALE),
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
