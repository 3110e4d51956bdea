"""Where a picture goes: the terminal, a pipe, or a file."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from spmd_engine.cli.show.as_image import write_image
from spmd_engine.cli.show.as_text import print_picture
from spmd_engine.cli.show.picture import Picture


def present(picture: Picture, output: Path | None) -> None:
    """Print a picture, in colour where there is a terminal, or write it to ``output``."""
    if output is None:
        print_picture(picture, Console())
        return
    write_image(picture, output)
    click.echo(f"wrote {output}")
