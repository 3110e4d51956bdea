"""A picture as text: box-drawing characters, coloured where somebody is watching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.style import Style
from rich.text import Text

from spmd_engine.cli.show.picture import WIDEST, Cell, Picture, ink, size, text

UP, RIGHT, DOWN, LEFT = 1, 2, 4, 8
#: By the directions in which lines leave a place: their sum is the index.
LINES = " ╵╶└╷│┌├╴┘─┴┐┤┬┼"
PLAIN = str.maketrans(LINES[1:], "|-+||++-+-+++++")

Row = list[tuple[str, str | None]]  # characters, each with its background


def print_picture(picture: Picture, console: Console) -> None:
    """Print it; without colours in a pipe, in which the text is the same whatever the terminal."""
    widest = console.width if console.is_terminal else WIDEST
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    for line in lines(picture, widest):
        if ascii_only:
            line.plain = line.plain.translate(PLAIN)
        console.print(line, soft_wrap=True, highlight=False)


def lines(picture: Picture, widest: int = WIDEST) -> Iterator[Text]:
    """Title, drawing, table and notes as lines of text; the drawing no wider than ``widest`` if it can be folded."""
    yield Text(picture.title, style="bold")
    yield Text()
    yield from map(_line, _folded(_canvas(picture.drawing), picture.fold, widest))
    for part in (picture.table, [text(0, line, note) for line, note in enumerate(picture.notes)]):
        if part:
            yield Text()
            yield from map(_line, _canvas(part))


def _line(row: Row) -> Text:
    line = Text()
    for fill, run in groupby(row, key=lambda place: place[1]):
        style = Style(color=ink(fill), bgcolor=fill) if fill else None
        line.append("".join(character for character, _ in run), style)
    line.rstrip()
    return line


def _canvas(cells: Sequence[Cell]) -> list[Row]:
    """Each place's character and background; labels come last, over borders."""
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
    """A label in the middle of its cell's lines; what does not fit is cut off."""
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


def _folded(canvas: list[Row], fold: tuple[int, int] | None, widest: int) -> Iterator[Row]:
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
