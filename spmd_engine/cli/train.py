"""``train``: the main job."""

from __future__ import annotations

import signal
import sys
from typing import Any

import click

from spmd_engine.cli.options import options_of, values_given
from spmd_engine.cli.planned_job import AUTO, planned_here, planned_values
from spmd_engine.cli.report import Reporter
from spmd_engine.errors import UsageError
from spmd_engine.runtime.signals import REQUEUE
from spmd_engine.training.run_job import read_job, read_run, run_folder
from spmd_engine.training.run_job import train as train_job
from spmd_engine.training.train_config import FIXED, TrainConfig
from spmd_engine.training.workload import PAGE_MODEL

_RESUME = f"""Continue the run --run, with its own options and those given here. Its {", ".join(FIXED)} cannot change;
what its composition has that the mesh cannot have is left out."""


@click.command(short_help="Train a model of text, or of images.")
@click.option("--run", metavar="NAME", help="Folder for results, or its name under runs/. [default: MODEL-NUMBER]")
@click.option("--resume", is_flag=True, help=_RESUME)
@click.option("--config", metavar="FILE", help="A job in JSON, such as the config.json of a run; options override it.")
@click.option("--plan", metavar="FILE", help="Spread the model as in a file of 'plan --output'; or: --mesh auto.")
@click.option("--stop-at", type=int, metavar="STEP", help="Save and stop after this step. [default: the last]")
@click.option("--requeue", is_flag=True, help=f"After a save on a signal, exit with code {REQUEUE}, to be requeued.")
@click.option("--trace", metavar="STEPS", type=int, help="Record this many steps in trace.json.")
@click.option(
    "--enforce/--no-enforce",
    default=True,
    help="Fail if the collectives of step 1 differ from its analysis; else print the difference.",
)
@options_of(TrainConfig, without=["images"])
@click.pass_context
def train(context: click.Context, **options: Any) -> None:
    """Train a model of text or of images on all ranks that were started.

    The results depend on the seed and the options, not on the mesh: the same command on 1 and on 8 ranks gives the
    same losses, to rounding. They are written to runs/NAME: config.json, metrics.jsonl (one object per step) and a
    checkpoint, which --resume, 'generate' and 'infer' load. --resume uses the run's own options except those given
    here and --mesh, and continues exactly from the last save; with more --steps, the learning rate follows its cosine
    over the new number. Ctrl-C, SIGTERM or SIGUSR1, sent to mpiexec or to any rank, saves after the current step. A
    second signal, or one before the first step is done, ends the job at once.

    Sizes and times take units, as in 32MiB and 30s; without one, they are bytes and seconds.
    """
    if options["trace"] is not None and options["trace"] < 1:
        raise UsageError(f"--trace {options['trace']}: it must be from 1")
    try:
        train_job(
            job_of(context),
            options["run"],
            resume=options["resume"],
            given=_given(context),
            stop_at=options["stop_at"],
            trace=options["trace"] or 0,
            observers=[Reporter()],
            enforce=options["enforce"],
        )
    except SystemExit as stopped:  # by a signal, after a save
        if options["requeue"] and stopped.code != 128 + signal.SIGINT:
            sys.exit(REQUEUE)
        raise


def job_of(context: click.Context) -> TrainConfig:
    """The job that a command line of ``train`` describes, with the values of its file or of the run that it resumes."""
    options, values = context.params, _given(context)
    if options["resume"]:
        if not options["run"] or options["config"]:
            raise UsageError("--resume needs --run NAME, and takes its options from there, not from --config")
        return read_run(options["run"]).resumed(str(run_folder(options["run"])), **values)
    if options["plan"]:
        values = planned_values(options["plan"], values)
    job = read_job(options["config"]).with_options(**values) if options["config"] else TrainConfig.of(**values)
    if job.strategy and options["model"] is None and not options["config"]:
        job = job.with_options(model=PAGE_MODEL)
    return planned_here(job, values) if options["mesh"] == AUTO else job


def _given(context: click.Context) -> dict[str, Any]:
    """The options of the job that were given; ``--mesh auto`` is none of them."""
    return values_given({name: value for name, value in context.params.items() if (name, value) != ("mesh", AUTO)})
