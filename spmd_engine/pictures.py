"""Pictures and tables as data: cells on a grid of characters, as text, SVG, PNG and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from io import BytesIO
from itertools import accumulate
from typing import Any

from spmd_engine.errors import UsageError

#: Colours that colour-blind people distinguish (Okabe and Ito, 2008); labels repeat their meaning in words.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, PALE = "#0072B2", "#D55E00", "#CC79A7", "#DDDDDD"
COLOURS = (SKY, ORANGE, GREEN, YELLOW, PURPLE, BLUE, VERMILLION)

WIDEST = 110  # columns of text, on every terminal: wider drawings continue below


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
        """The first column to the right of the cell."""
        return self.x + self.width + self.outline

    @property
    def bottom(self) -> int:
        return self.y + self.height + self.outline


@dataclass(frozen=True)
class Picture:
    """A title, the drawing, and below it a table and notes.

    ``fold`` (columns of a heading, columns of a unit) lets a wide drawing, as text, continue below under the same
    heading, broken between units.
    """

    title: str
    drawing: Sequence[Cell]
    table: Sequence[Cell] = ()
    notes: Sequence[str] = ()
    fold: tuple[int, int] | None = None

    def rows(self, widest: int = WIDEST) -> Iterator[Row]:
        """Title, drawing, table and notes as text, with an empty row between them; the drawing no wider than ``widest``
        if it can be folded."""
        yield [(self.title, None)]
        notes: list[Row] = [[(note, None)] for note in self.notes]
        for part in [*text_rows(self.drawing, self.fold, widest)], [*text_rows(self.table)], notes:
            yield from [[], *part] if part else ()

    def __str__(self) -> str:
        return "\n".join("".join(characters for characters, _ in row).rstrip() for row in self.rows())

    def _repr_html_(self) -> str:
        """An image for notebooks and pages; its texts are read aloud."""
        label = escape(". ".join([self.title, *self.notes]))
        return f'<figure class="wide" role="img" aria-label="{label}">{svg(self, inline=True).decode()}</figure>'

    def placed(self) -> list[Cell]:
        """All parts as cells, one below the other."""
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
    """Rows of text in columns two apart. ``align`` has a letter for each column: l for left, r for right."""
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
    """Outlined cells in rows and columns, named on the left and above. Columns that do not fit continue below."""
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
    """Black or white: the one with the higher contrast on ``fill`` (WCAG 2.2)."""
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
    """``0,1,2``; if there are more than ``most``, the first three and the last."""
    if len(numbers) > most:
        return ",".join(map(str, numbers[:3])) + f",...,{numbers[-1]}"
    return ",".join(map(str, numbers))


# --- A picture as text: box-drawing characters with their backgrounds


UP, RIGHT, DOWN, LEFT = 1, 2, 4, 8
#: The index of a character is the sum of the directions in which its lines leave it.
LINES = " ╵╶└╷│┌├╴┘─┴┐┤┬┼"

Row = list[tuple[str, str | None]]  # characters with their backgrounds


def text_rows(cells: Sequence[Cell], fold: tuple[int, int] | None = None, widest: int = WIDEST) -> Iterator[Row]:
    """The rows of characters of a drawing; no wider than ``widest`` if it can be folded."""
    canvas = _canvas(cells)
    columns = len(canvas[0]) if canvas else 0
    if fold is None or columns <= widest:
        yield from canvas
        return
    head, unit = fold
    step = max(1, (widest - head) // unit) * unit
    for start in range(head, columns, step):
        if start > head:
            yield []
        for row in canvas:
            yield row[:head] + row[start : start + step]


def _canvas(cells: Sequence[Cell]) -> list[Row]:
    """The character and background of each place; labels are drawn last, over borders."""
    columns, rows = size(cells)
    directions = [[0] * columns for _ in range(rows)]
    canvas: list[Row] = [[(" ", None)] * columns for _ in range(rows)]
    for cell in cells:
        for y in range(cell.y + cell.outline, cell.y + cell.height):
            for x in range(cell.x + cell.outline, cell.x + cell.width):
                canvas[y][x] = (" ", cell.fill or canvas[y][x][1])
        if cell.outline:
            _outline(directions, cell)
    for y, line in enumerate(directions):
        for x, leaving in enumerate(line):
            if leaving:
                canvas[y][x] = (LINES[leaving], None)
    for cell in cells:
        _write(canvas, cell)
    return canvas


def _outline(directions: list[list[int]], cell: Cell) -> None:
    right, bottom = cell.x + cell.width, cell.y + cell.height
    for x in range(cell.x, right):
        for y in (cell.y, bottom):
            directions[y][x] |= RIGHT
            directions[y][x + 1] |= LEFT
    for y in range(cell.y, bottom):
        for x in (cell.x, right):
            directions[y][x] |= DOWN
            directions[y + 1][x] |= UP


def _write(canvas: list[Row], cell: Cell) -> None:
    """Write a label in the middle of its cell's lines, truncated to the cell's columns."""
    if not cell.label:
        return
    labels = cell.label.split("\n")
    room, left = cell.width - cell.outline, cell.x + cell.outline
    first = cell.y + cell.outline + (cell.height - cell.outline - len(labels)) // 2
    for y, label in enumerate(labels, start=first):
        shown = label[:room]
        spare = room - len(shown)
        start = left + {"left": 0, "center": spare // 2, "right": spare}[cell.align]
        for x, character in enumerate(shown, start=start):
            canvas[y][x] = (character, canvas[y][x][1])


# --- A picture as SVG, or as PNG by Pillow


COLUMN, LINE, FONT, MARGIN = 8, 18, 13, 12  # pixels: width of a column, height of a line, size of letters, margin
BORDER, BETWEEN, PAPER = "#333333", "#FFFFFF", "#FFFFFF"


def svg(picture: Picture, inline: bool = False) -> bytes:
    """The picture as an SVG document: a ``rect`` for each cell with a border or fill, a ``text`` for each label.

    ``inline``: inside a page, without paper and in the page's colour of text, so that it is readable light and dark.
    """
    width, height = pixels(picture)
    pen, paper = ("currentColor", "none") if inline else (BORDER, PAPER)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{FONT}" '
        f'style="background:{paper}">',
        f"<title>{escape(picture.title, quote=False)}</title>",
    ]
    for cell in picture.placed():
        left, top, wide, high = rectangle(cell)
        if cell.outline or cell.fill:
            parts.append(
                f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" fill="{cell.fill or "none"}" '
                f'stroke="{pen if cell.outline else BETWEEN}"/>'
            )
        for x, y, label in labels(cell):
            anchor = {"left": "start", "center": "middle", "right": "end"}[cell.align]
            colour = ink(cell.fill) if cell.fill else pen
            parts.append(
                f'<text x="{x}" y="{y}" text-anchor="{anchor}" dominant-baseline="central" fill="{colour}">'
                f"{escape(label, quote=False)}</text>"
            )
    return "\n".join([*parts, "</svg>\n"]).encode(errors="backslashreplace")


def png(picture: Picture) -> bytes:
    """The picture as PNG, at twice the size. Raises UsageError if Pillow is missing."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise UsageError(
            "--output: PNG needs Pillow. Install it with: pip install 'spmd_engine[png]', or write .svg"
        ) from error
    scale = 2
    width, height = pixels(picture)
    image = Image.new("RGB", (scale * width, scale * height), PAPER)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(scale * FONT)
    for cell in picture.placed():
        left, top, wide, high = (round(scale * side) for side in rectangle(cell))
        if cell.outline or cell.fill:
            border = BORDER if cell.outline else BETWEEN
            draw.rectangle((left, top, left + wide, top + high), fill=cell.fill, outline=border, width=scale)
        for x, y, label in labels(cell):
            anchor = {"left": "lm", "center": "mm", "right": "rm"}[cell.align]
            colour = ink(cell.fill) if cell.fill else BORDER
            draw.text((scale * x, scale * y), label, fill=colour, font=font, anchor=anchor)
    content = BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def pixels(picture: Picture) -> tuple[int, int]:
    """Width and height of a picture in pixels."""
    columns, rows = size(picture.placed())
    return columns * COLUMN + 2 * MARGIN, rows * LINE + 2 * MARGIN


def rectangle(cell: Cell) -> tuple[float, float, int, int]:
    """Left, top, width and height in pixels; an outline runs through the middle of a character's place."""
    left, top = cell.x + cell.outline / 2, cell.y + cell.outline / 2
    return MARGIN + left * COLUMN, MARGIN + top * LINE, cell.width * COLUMN, cell.height * LINE


def labels(cell: Cell) -> Iterator[tuple[float, float, str]]:
    """Each line of a label with its anchor point, at half the height of the line."""
    if not cell.label:
        return
    left, top, wide, high = rectangle(cell)
    inset = COLUMN / 2 if cell.outline or cell.fill else 0
    x = {"left": left + inset, "center": left + wide / 2, "right": left + wide - inset}[cell.align]
    labels = cell.label.split("\n")
    for line, label in enumerate(labels):
        yield x, top + high / 2 + (line - (len(labels) - 1) / 2) * LINE, label


# --- Tables as HTML


def html_table(caption: str, head: Sequence[Any], rows: Sequence[Sequence[Any]], numbers: bool = True) -> str:
    """A table; the first column names its rows, and the others are ``numbers`` or texts."""
    kind = ' class="numbers"' if numbers else ""
    heads = "".join(f'<th scope="col">{escape(str(cell))}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(str(row[0]))}</th>'
        + "".join(f"<td>{escape(str(c))}</td>" for c in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table{kind}><caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
