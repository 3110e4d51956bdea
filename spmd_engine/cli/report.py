"""``report``: one HTML file of a run, or of several runs that are compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from spmd_engine.cli.values import FILE
from spmd_engine.files import check_ending, output_file
from spmd_engine.foreign import reading
from spmd_engine.observability.run_page import page_of
from spmd_engine.observability.run_record import RunRecord
from spmd_engine.training.run_folder import run_folder

EVERY = 5  #: seconds between pages of a run that is followed


@click.command(short_help="One HTML page of a run, or of several compared.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--output",
    "-o",
    type=FILE,
    metavar="FILE.html",
    help="The file to write. [default: report.html in the folder of the first RUN]",
)
@click.option("--follow", is_flag=True, help=f"Write the page again every {EVERY} seconds until the run ends.")
def report(runs: tuple[str, ...], output: Path | None, follow: bool) -> None:
    """Write a page about runs that a browser opens without a network: curves, where the time of a step went, memory and
    communication beside their predictions, the mesh, events, a sample, options and environment.

    Of several runs it first shows what differs: times, options and environments.

    \b
      python -m spmd_engine report gpt-nano-1
      python -m spmd_engine report runs/gpt-nano-1 runs/gpt-nano-2 -o compared.html
    """
    folders = [run_folder(run) for run in runs]
    if output is not None:
        check_ending("--output", output, ".html")
    while write_report(folders, output, EVERY if follow else 0):
        time.sleep(EVERY)


def write_report(folders: Sequence[Path], output: Path | None = None, every: int = 0) -> bool:
    """Write the page of these runs; a browser reloads it ``every`` so many seconds while a run goes on. Returns whether
    one does. ``output``: None: ``report.html`` in the first folder, where it replaces a link.

    Raises UsageError for a folder that is no run's, and if the file cannot be written.
    """
    with reading(f"{', '.join(map(str, folders))}: no page can be made of what is there"):
        runs = [RunRecord.read(folder) for folder in folders]
        running = bool(every) and any(run.state == "running" for run in runs)
        page = page_of(runs, every if running else 0)
    path = output or folders[0] / "report.html"
    with output_file(path, follow=output is not None) as file:
        file.write(page.encode(errors="backslashreplace"))  # names of files may have bytes that are no characters
    click.echo(f"wrote {path}")
    return running
