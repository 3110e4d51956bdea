"""Where a picture goes: the terminal, a pipe, or a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

import click
from rich.console import Console
from rich.style import Style
from rich.text import Text

from spmd_engine.cli.output_file import output_file
from spmd_engine.cli.show.picture import WIDEST, Cell, Picture, ink, size, text
from spmd_engine.errors import UsageError

output_option = click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the picture to FILE.svg, or FILE.png (needs Pillow), instead of printing it.",
)


def present(picture: Picture, output: Path | None) -> None:
    """Print a picture, in colour where there is a terminal, or write it to ``output``."""
    if output is None:
        print_picture(picture, Console())
        return
    write_image(picture, output)
    click.echo(f"wrote {output}")


# --- A picture as text: box-drawing characters, coloured where somebody is watching


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


# --- A picture as SVG, by our own few lines, or as PNG, by Pillow


COLUMN, LINE, FONT, MARGIN = 8, 18, 13, 12  # pixels: a column's width, a line's height, letters, all around
BORDER, BETWEEN, PAPER = "#333333", "#FFFFFF", "#FFFFFF"


def write_image(picture: Picture, path: Path) -> None:
    """Write it as the ending of ``path`` says; raises UsageError for an ending that is neither .svg nor .png."""
    writers = {".svg": write_svg, ".png": write_png}
    if path.suffix.lower() not in writers:
        raise UsageError(f"--output {path}: write a picture as .svg or .png")
    writers[path.suffix.lower()](picture, path)


def write_svg(picture: Picture, path: Path) -> None:
    """A ``rect`` for each cell that is not plain text, a ``text`` for each line of a label."""
    with output_file(path) as file:
        file.write(svg(picture).encode())


def svg(picture: Picture) -> str:
    """The picture as a document of its own."""
    width, height = _pixels(picture)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{FONT}" '
        f'style="background:{PAPER}">',
        f"<title>{escape(picture.title, quote=False)}</title>",
    ]
    for cell in picture.placed():
        left, top, wide, high = _rectangle(cell)
        if cell.outline or cell.fill:
            parts.append(
                f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" fill="{cell.fill or "none"}" '
                f'stroke="{BORDER if cell.outline else BETWEEN}"/>'
            )
        for x, y, label in _labels(cell):
            anchor = {"left": "start", "center": "middle", "right": "end"}[cell.align]
            colour = ink(cell.fill) if cell.fill else BORDER
            parts.append(
                f'<text x="{x}" y="{y}" text-anchor="{anchor}" dominant-baseline="central" fill="{colour}">'
                f"{escape(label, quote=False)}</text>"
            )
    return "\n".join([*parts, "</svg>\n"])


def write_png(picture: Picture, path: Path) -> None:
    """Drawn at twice the size, for the screens of today. Needs Pillow; raises UsageError where it is missing."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise UsageError(
            f"--output {path}: PNG needs Pillow. Install it with: pip install 'spmd_engine[png]', or write .svg"
        ) from error
    scale = 2
    image = Image.new("RGB", tuple(scale * side for side in _pixels(picture)), PAPER)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(scale * FONT)
    for cell in picture.placed():
        left, top, wide, high = (round(scale * side) for side in _rectangle(cell))
        if cell.outline or cell.fill:
            border = BORDER if cell.outline else BETWEEN
            draw.rectangle((left, top, left + wide, top + high), fill=cell.fill, outline=border, width=scale)
        for x, y, label in _labels(cell):
            anchor = {"left": "lm", "center": "mm", "right": "rm"}[cell.align]
            colour = ink(cell.fill) if cell.fill else BORDER
            draw.text((scale * x, scale * y), label, fill=colour, font=font, anchor=anchor)
    with output_file(path) as file:
        image.save(file, "PNG")


def _pixels(picture: Picture) -> tuple[int, int]:
    columns, rows = size(picture.placed())
    return columns * COLUMN + 2 * MARGIN, rows * LINE + 2 * MARGIN


def _rectangle(cell: Cell) -> tuple[float, float, int, int]:
    """Left, top, width and height in pixels; an outline runs through the middle of a character's place."""
    left, top = cell.x + cell.outline / 2, cell.y + cell.outline / 2
    return MARGIN + left * COLUMN, MARGIN + top * LINE, cell.width * COLUMN, cell.height * LINE


def _labels(cell: Cell) -> Iterator[tuple[float, float, str]]:
    """Each line of a label with the point it is aligned to: half-way up the line."""
    if not cell.label:
        return
    left, top, wide, high = _rectangle(cell)
    inset = COLUMN / 2 if cell.outline or cell.fill else 0
    x = {"left": left + inset, "center": left + wide / 2, "right": left + wide - inset}[cell.align]
    labels = cell.label.split("\n")
    for line, label in enumerate(labels):
        yield x, top + high / 2 + (line - (len(labels) - 1) / 2) * LINE, label
