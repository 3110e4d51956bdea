"""What every picture is made of: rectangles with labels, measured in columns and lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

#: Colours that colour-blind people tell apart (Okabe and Ito, 2008); labels say the same in words.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, PALE = "#0072B2", "#D55E00", "#CC79A7", "#DDDDDD"
COLOURS = (SKY, ORANGE, GREEN, YELLOW, PURPLE, BLUE, VERMILLION)

WIDEST = 110  # columns: what is drawn side by side goes on below, so that text looks the same everywhere


@dataclass(frozen=True)
class Cell:
    """A rectangle with a label, which may have several lines.

    An outlined cell's border runs through columns ``x`` and ``x + width`` and lines ``y`` and ``y + height``, so
    that neighbours share it. A cell without outline covers columns from ``x`` up to, not including, ``x + width``.
    Without outline and fill it is plain text.
    """

    x: int
    y: int
    width: int
    height: int = 1
    label: str = ""
    fill: str | None = None
    outline: bool = True
    align: str = "center"  #: or "left" or "right"

    def moved(self, x: int, y: int) -> Cell:
        return replace(self, x=self.x + x, y=self.y + y)

    @property
    def right(self) -> int:
        """The first column that is free again."""
        return self.x + self.width + self.outline

    @property
    def bottom(self) -> int:
        return self.y + self.height + self.outline


@dataclass(frozen=True)
class Picture:
    """A title, the drawing, and below it a table and notes.

    ``fold`` (columns of a heading, columns of a unit) lets a wide drawing, as text, go on below under the same
    heading, broken between units.
    """

    title: str
    drawing: Sequence[Cell]
    table: Sequence[Cell] = ()
    notes: Sequence[str] = ()
    fold: tuple[int, int] | None = None

    def placed(self) -> list[Cell]:
        """All there is as cells, one below the other."""
        notes = [text(0, line, note) for line, note in enumerate(self.notes)]
        cells, line = [], 0
        for part in ([text(0, 0, self.title)], self.drawing, self.table, notes):
            cells += [cell.moved(0, line) for cell in part]
            line += size(part)[1] + 1 if part else 0
        return cells


def size(cells: Sequence[Cell]) -> tuple[int, int]:
    """Columns and lines that cells take."""
    return max((cell.right for cell in cells), default=0), max((cell.bottom for cell in cells), default=0)


def text(x: int, y: int, label: str, width: int | None = None, align: str = "left") -> Cell:
    """A line of plain text."""
    return Cell(x, y, len(label) if width is None else width, 1, label, outline=False, align=align)


def table(rows: Sequence[Sequence[str]], align: str) -> list[Cell]:
    """Rows of text in columns two apart. ``align`` has a letter a column: l for left, r for right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    starts = list(accumulate([width + 2 for width in widths], initial=0))
    sides = {"l": "left", "r": "right"}
    return [
        text(starts[column], line, label, widths[column], sides[align[column]])
        for line, row in enumerate(rows)
        for column, label in enumerate(row)
        if label
    ]


def grid(
    row_names: Sequence[str],
    column_names: Sequence[str],
    labels: Sequence[Sequence[str]],
    fills: Sequence[Sequence[str | None]],
) -> list[Cell]:
    """Outlined cells in rows and columns, named on the left and above. What is too wide goes on below."""
    left = max(map(len, row_names)) + 1 if any(row_names) else 0
    top = 1 if any(column_names) else 0
    lines = [line for row in labels for label in row for line in label.split("\n")]
    width = max(map(len, [*lines, *column_names])) + 3
    height = max(label.count("\n") for row in labels for label in row) + 2
    across = max(1, (WIDEST - left - 1) // width)
    cells: list[Cell] = []
    y = 0
    for first in range(0, len(column_names), across):
        columns = range(first, min(first + across, len(column_names)))
        cells += [text(left + (c - first) * width + 1, y, column_names[c], width - 1, "center") for c in columns if top]
        for r, name in enumerate(row_names):
            line = y + top + r * height
            if name:
                cells.append(text(0, line + height // 2, name))
            for c in columns:
                cells.append(Cell(left + (c - first) * width, line, width, height, labels[r][c], fills[r][c]))
        y += top + len(row_names) * height + 2
    return cells


def ink(fill: str) -> str:
    """Black or white, whichever is easier to read on ``fill`` (contrast as WCAG 2.2 defines it)."""
    red, green, blue = (_linear(channel / 255) for channel in rgb(fill))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "#FFFFFF"


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def tint(fill: str, share: float) -> str:
    """``fill`` with a ``share`` of white in it."""
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02X}" for channel in rgb(fill))


def rgb(colour: str) -> tuple[int, int, int]:
    """``"#E69F00"`` as numbers from 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def listed(numbers: Sequence[int], most: int = 8) -> str:
    """``0,1,2``; of more than ``most``, the first three and the last."""
    if len(numbers) > most:
        return ",".join(map(str, numbers[:3])) + f",...,{numbers[-1]}"
    return ",".join(map(str, numbers))
