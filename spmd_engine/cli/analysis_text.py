"""The page of ``analyze``: tables of layers and of communication, the peak, and a picture of the memory."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.table import Table

from spmd_engine.cli.show.picture import (
    BLUE,
    GREEN,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Cell,
    Picture,
    table,
    text,
)
from spmd_engine.planning import RankStep, StepAnalysis
from spmd_engine.planning.dry_run.match_calls import critical_path
from spmd_engine.planning.dry_run.step_analysis import BACKWARD_INPUT, BACKWARD_WEIGHTS, FORWARD, KINDS, RECOMPUTED
from spmd_engine.units import readable_bytes

_PHASES = (FORWARD, RECOMPUTED, BACKWARD_INPUT, BACKWARD_WEIGHTS)
_MOST_HELD = 10


def describe(analysis: StepAnalysis, rank: int, console: Console) -> None:
    """Print the step of one rank, and the totals of all ranks."""
    step = analysis.of_rank(rank)
    where = ", ".join(f"{axis} {place}" for axis, place in step.coordinates.items())
    console.print(
        f"{analysis.model}: {analysis.parameters:,} parameters on {analysis.ranks} ranks, "
        f"{len(analysis.classes)} classes of equal ranks"
    )
    console.print(
        f"a step of all ranks: {analysis.flops / 1e9:,.2f} GFLOP in matrix products, {analysis.calls:,} calls, "
        f"{analysis.bytes_sent:,} bytes sent"
    )
    console.print(f"largest peak {analysis.peak_bytes:,} bytes; below: rank {rank} (as the rank at {where})\n")
    console.print(_layers(step))
    console.print(_totals(analysis))
    path = critical_path(analysis)
    console.print(
        f"critical path: {path.flops / 1e9:,.2f} GFLOP in {len(path.nodes):,} computations, through "
        f"{len(path.classes):,} ranks in turn; this rank computes {step.flops / 1e9:,.2f}\n"
    )
    console.print(f"at its peak, in {_at(step)}, this rank holds {step.peak.bytes:,} bytes:")
    for kind, what, size in step.peak.holds[:_MOST_HELD]:
        console.print(f"  {size:>15,}  {kind}{f': {what}' if what else ''}")
    if tables := analysis.tables_of_rank(rank):
        console.print(f"and {tables:,} bytes of slot tables throughout the step")
    for note in analysis.approximate:
        console.print(f"assumed: {note}")


def _at(step: RankStep) -> str:
    name = step.computations[step.peak.computation].name if step.computations else "nothing"
    m = step.computations[step.peak.computation].micro_batch if step.computations else None
    return f"{name}{f' of micro-batch {m}' if m is not None else ''}"


def _layers(step: RankStep) -> Table:
    """A row for each layer; equal layers share one."""
    flops: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    sent: dict[str, float] = defaultdict(float)
    moved: dict[str, int] = defaultdict(int)
    for each in step.computations:
        flops[each.layer][each.phase] += each.flops
        moved[each.layer] += each.bytes_read + each.bytes_written
    for each in step.communications:
        sent[each.label] += each.sent
    held: dict[str, int] = defaultdict(int)
    for shard in step.shards:
        held[shard.layers[0] if shard.layers else ""] += shard.bytes
    lines: list[tuple[list[str], tuple[str, ...]]] = []
    for layer in flops:
        if not layer:
            continue
        most = max((size for name, size in step.temporaries.items() if name.startswith(f"{layer} ")), default=0)
        numbers = (
            f"{held[layer]:,}",
            *(f"{flops[layer][phase] / 1e9:,.3f}" for phase in _PHASES),
            f"{moved[layer]:,}",
            f"{step.saved.get(layer, 0):,}",
            f"{most:,}",
            f"{sent[layer]:,.0f}",
        )
        alike = next((names for names, other in lines if other == numbers), None)
        if alike is None:
            lines.append(([layer], numbers))
        else:
            alike.append(layer)
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


# --- A picture of a rank's memory over a step, by kind


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
    """A picture whose columns are the moments of highest memory in equal parts of the step."""
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
    """One column: the kinds stacked in order, the first lowest."""
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
