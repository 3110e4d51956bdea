"""``monitor``: a run in the terminal, while it goes on."""

from __future__ import annotations

import sys
import time
from io import TextIOWrapper

import click
from rich.console import Console
from rich.live import Live

from spmd_engine.observability.monitor import Watched
from spmd_engine.training.run_folder import run_folder

WIDTH = 240  #: columns where there is no terminal, so that nothing is cut
EVERY = 1.0  #: seconds between two looks at the folder


@click.command(short_help="A run in the terminal, while it goes on.")
@click.argument("run", metavar="RUN")
@click.option("--once", is_flag=True, help="Print what is known now, and end.")
def monitor(run: str, once: bool) -> None:
    """Show a run until it ends: progress with the time left, curves of loss, and what each rank does and holds.

    RUN is a folder, or its name under runs/. Only files of this folder are read, so the run may be on other nodes.
    Without a terminal, the same is printed whenever a step is done. The exit code is 1 if the run has ended by an error
    or was killed. Ctrl-C ends the monitor, not the run.

    \b
      python -m spmd_engine monitor gpt-nano-1
      python -m spmd_engine monitor runs/gpt-nano-1 --once
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names that the terminal cannot show
    folder, console = run_folder(run), Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    watched = Watched(folder)
    watched.look()
    if not once and watched.goes_on and console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while watched.goes_on:
                live.update(watched.frame(console, console.height), refresh=True)
                time.sleep(EVERY)
                watched.look()
    console.print(watched.frame(console))
    while watched.goes_on and not once:
        time.sleep(EVERY)
        if watched.look():
            console.print()
            console.print(watched.frame(console))
    if watched.failed:
        raise SystemExit(1)
