"""The part of ``data show`` for data sets of images."""

from __future__ import annotations

import json
from pathlib import Path

import click

from spmd_engine.files import check_ending, output_file
from spmd_engine.training.data.contact_sheet import as_lines, show_images


def print_images(path: str, count: int, output: str, as_json: bool) -> None:
    """Print the classes of a data set of images, and what of it is not read; write ``output``, its contact sheet."""
    check_ending("--output", output, ".png")
    facts, sheet = show_images(path, count)
    with output_file(Path(output)) as file:
        file.write(sheet)
    if as_json:
        click.echo(json.dumps({**facts, "sheet": output}))
    else:
        click.echo("\n".join([*as_lines(facts), f"wrote {output}"]))
