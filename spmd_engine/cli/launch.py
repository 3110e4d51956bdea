"""``launch``: start a job, and restart it when a rank dies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from spmd_engine.checkpoints import CheckpointFolder
from spmd_engine.cli.values import WholeNumber, WholeRange
from spmd_engine.runtime.supervisor import Supervisor
from spmd_engine.training.run_folder import run_folder


@click.command(
    short_help="Start a job, and restart it when a rank dies.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-n", "--ranks", type=WholeNumber(), default=1, help="Number of ranks, as for mpiexec.")
@click.option("--hosts", metavar="A,B,...", help="Hosts, as for mpiexec. [default: this one]")
@click.option("--max-restarts", type=WholeRange(min=0), default=3, help="Most restarts in a row without progress.")
@click.option(
    "--min-ranks", type=WholeNumber(), help="Continue with fewer ranks, down to this number. [default: as -n]"
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(ranks: int, hosts: str | None, max_restarts: int, min_ranks: int | None, arguments: tuple[str, ...]) -> None:
    """Start ranks with mpiexec, and restart all of them from the last checkpoint when one dies.

    \b
      python -m spmd_engine launch -n 8 -- train --run mine --save-every 50
      python -m spmd_engine launch -n 8 --max-restarts 10 --min-ranks 6 -- train --run mine
      python -m spmd_engine launch -n 4 -- my_script.py --its-own options

    A restart waits until all ranks of the old job are gone, and removes their files in /dev/shm. The first follows
    after a second; each next without progress (a new checkpoint) after twice as long, up to a minute. 'train' continues
    with --resume once there is a checkpoint; a script of your own finds the number of restarts in SPMD_RESTARTS. If the
    job dies twice without a save in between, it continues with one rank less, if --min-ranks permits.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are forwarded to the ranks, which save and end; then, and after an error in the
    command (exit code 2), there is no restart. scripts/slurm.sh and scripts/pbs.sh are jobs for batch systems.
    """
    newest = newest_checkpoint(arguments)
    sys.exit(Supervisor(ranks, arguments, max_restarts, min_ranks, hosts or "", newest).run())


def newest_checkpoint(arguments: Sequence[str]) -> Callable[[], Path | None] | None:
    """A function that finds the newest checkpoint of the run of ``--run``; None without ``--run``."""
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--run" and (equals or number + 1 < len(arguments)):
            return CheckpointFolder(run_folder(value if equals else arguments[number + 1])).newest
    return None
