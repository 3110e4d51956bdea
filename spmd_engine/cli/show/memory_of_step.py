"""A picture of a rank's memory over a step: what it holds, moment by moment, by what it is for."""

from __future__ import annotations

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
from spmd_engine.planning import StepAnalysis
from spmd_engine.planning.dry_run.step_analysis import KINDS
from spmd_engine.units import readable_bytes

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
    """Each column is the moment, of those it stands for, at which most is held."""
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
    """One column: kinds on top of each other, the first lowest."""
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
