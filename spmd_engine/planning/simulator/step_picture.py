"""A predicted step as a picture: a row for each rank, time from left to right."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from spmd_engine.pictures import GREEN, ORANGE, PALE, PURPLE, SKY, YELLOW, Cell, Picture, text
from spmd_engine.planning.simulator.simulation import COMMUNICATION, Prediction
from spmd_engine.units import readable_seconds

COLUMNS = 88
MOST_ROWS = 16
#: The end of a computation's name, with its letter, colour and description.
KINDS = (
    ("forward again", "R", PURPLE, "forward again"),
    ("forward", "F", SKY, "forward"),
    ("backward (input)", "B", ORANGE, "backward"),
    ("backward (weights)", "B", ORANGE, "backward"),
    ("", "u", GREEN, "loss, norm and update"),
)


def draw_step(prediction: Prediction, ranks: int) -> Picture:
    """A row for each simulated rank of ``ranks``: its main work in each of COLUMNS parts of the step."""
    rows = list(prediction.ranks)[:MOST_ROWS]
    left = max(len(f"rank {rank}") for rank in rows) + 1
    scale = COLUMNS / prediction.seconds
    filled: dict[int, list[Any]] = {rank: [Counter() for _ in range(COLUMNS)] for rank in rows}
    for rank in rows:
        for name, kind, start, end in prediction.spans[rank]:
            letter = "-" if kind == COMMUNICATION else next(c for ending, c, *_ in KINDS if name.endswith(ending))
            first, last = start * scale, end * scale
            for column in range(int(first), min(int(last) + 1, COLUMNS)):
                share = min(last, column + 1) - max(first, column)
                if share > 0:
                    filled[rank][column][letter] += share
    cells = [text(left, 0, "0"), text(left + COLUMNS - 8, 0, readable_seconds(prediction.seconds), 8, "right")]
    used = set()
    for row, rank in enumerate(rows, 1):
        cells.append(text(0, row, f"rank {rank}"))
        letters = [shares.most_common(1)[0][0] if shares else "." for shares in filled[rank]]
        used |= set(letters)
        cells += _runs(left, row, letters)
    legend = [f"{letter} {name}" for _, letter, _, name in dict.fromkeys(KINDS) if letter in used]
    legend = list(dict.fromkeys(legend)) + ["- waits in communication"] * ("-" in used) + [". idle"] * ("." in used)
    notes = [", ".join(legend) + "; what a rank does most in each column."]
    if len(prediction.ranks) > len(rows):
        notes.append(f"{len(prediction.ranks) - len(rows)} further ranks are not drawn.")
    if len(prediction.ranks) < ranks:
        notes.append(f"{len(prediction.ranks)} ranks, one for each stage, represent all {ranks}.")
    return Picture("the step, as predicted", cells, notes=notes)


def _runs(left: int, row: int, letters: list[str]) -> list[Cell]:
    fills = {letter: fill for _, letter, fill, _ in KINDS} | {"-": YELLOW}
    cells = []
    for letter, run in groupby(letters):
        label = "".join(run)
        cells.append(Cell(left, row, len(label), 1, label, fills.get(letter, PALE), False, "left"))
        left += len(label)
    return cells
