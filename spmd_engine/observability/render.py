"""Writes a picture to a terminal, a pipe, or a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from spmd_engine.errors import UsageError
from spmd_engine.files import output_file
from spmd_engine.pictures import LINES, WIDEST, Picture, Row, ink, png, svg

PLAIN = str.maketrans(LINES[1:], "|-+||++-+-+++++")


def print_picture(picture: Picture, console: Console) -> None:
    """Print a picture; in a pipe it has no colours, and its text does not depend on the terminal."""
    widest = console.width if console.is_terminal else WIDEST
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    for line in lines(picture, widest):
        if ascii_only:
            line.plain = line.plain.translate(PLAIN)
        console.print(line, soft_wrap=True, highlight=False)


def lines(picture: Picture, widest: int = WIDEST) -> list[Text]:
    """The rows of a picture; see ``Picture.rows``."""
    title, *rest = map(_text_line, picture.rows(widest))
    title.stylize("bold")
    return [title, *rest]


def text_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, *, edge: bool = True
) -> Table:
    """A table; numbers stand on the right below heads that begin with ">". ``edge``: with a space before each row."""
    table = Table(box=None, pad_edge=edge, title=title, title_justify="left")
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _text_line(row: Row) -> Text:
    line = Text()
    for fill, run in groupby(row, key=lambda place: place[1]):
        style = Style(color=ink(fill), bgcolor=fill) if fill else None
        line.append("".join(character for character, _ in run), style)
    line.rstrip()
    return line


def write_image(picture: Picture, path: Path) -> None:
    """Write a picture in the format of the ending of ``path``; raises UsageError unless that is .svg or .png."""
    writers = {".svg": svg, ".png": png}
    if path.suffix.lower() not in writers:
        raise UsageError(f"--output {path}: write a picture as .svg or .png")
    content = writers[path.suffix.lower()](picture)
    with output_file(path) as file:
        file.write(content)
