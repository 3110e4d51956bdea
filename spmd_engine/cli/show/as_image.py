"""A picture as SVG, by our own few lines, or as PNG, by Pillow."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from spmd_engine.cli.output_file import output_file
from spmd_engine.cli.show.picture import Cell, Picture, ink, size
from spmd_engine.errors import UsageError

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
