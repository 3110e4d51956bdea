"""``train``: the main job."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from spmd_engine.cli.options import LongCommand, options_of, permitted, rare_option, trust_option, values_given
from spmd_engine.cli.values import WholeNumber
from spmd_engine.errors import UsageError
from spmd_engine.jobs.resolve import AUTO, job_to_train
from spmd_engine.jobs.run_job import train as train_job
from spmd_engine.observability.progress import Reporter
from spmd_engine.runtime.launchers import check_started_by_launcher
from spmd_engine.runtime.signals import ENDING, REQUEUE
from spmd_engine.training import Observer
from spmd_engine.training.train_config import FIXED, AdaptConfig, TrainConfig

_RESUME = f"""Continue the run --run from its last save, with its own options and those given here. Its mesh is not
kept, and options that are impossible on the new one are dropped. With more --steps, the learning rate keeps its curve,
unless --decay-steps is given, too. What cannot change: {", ".join(FIXED)}."""


@click.command(cls=LongCommand, short_help="Train a model of text, or of images.")
@click.option("--run", metavar="NAME", help="Folder for results, or its name under runs/. [default: MODEL-NUMBER]")
@click.option("--resume", is_flag=True, help=_RESUME)
@click.option("--config", metavar="FILE", help="A job in JSON, such as the config.json of a run; options override it.")
@click.option("--plan", metavar="FILE", help="Spread the model as in a file of 'plan --output'; or: --mesh auto.")
@rare_option("--stop-at", type=WholeNumber(), metavar="STEP", help="Save and stop after this step. [default: the last]")
@rare_option("--requeue", is_flag=True, help=f"After a save on a signal, exit with code {REQUEUE}, to be requeued.")
@rare_option(
    "--logger",
    multiple=True,
    metavar="NAME",
    help="Also log to csv, prometheus or tensorboard, or FILE.py:NAME; may repeat.",
)
@rare_option(
    "--adapt/--no-adapt",
    "adapts",
    default=None,
    help="Change the shape of the run by the measured speeds of its ranks. Each --adapt-... does, too.",
)
@click.option("--report", is_flag=True, help="At the end, write report.html, as the command 'report' does.")
@rare_option("--trace", metavar="STEPS", type=WholeNumber(), help="Record this many steps in trace.json.")
@rare_option(
    "--enforce/--no-enforce",
    default=True,
    show_default=False,
    help="Fail if the collectives of step 1 differ from its analysis; else print the difference.",
)
@trust_option
@options_of(TrainConfig, without=["images"])
@click.pass_context
def train(context: click.Context, **options: Any) -> None:
    """Train a model of text or of images on all ranks that were started.

    The same command on 1 and on 8 ranks gives the same losses, to rounding. Results are written to runs/NAME:
    config.json, metrics.jsonl (one object per step) and a checkpoint, which --resume, 'generate' and 'infer' load.
    Ctrl-C, SIGTERM or SIGUSR1, sent to mpiexec or to any rank, saves after the current step, or batch of an evaluation.
    A second signal, or one before the first step is done, ends the job at once.

    Sizes and times take units, as in 32MiB and 30s; without one, they are bytes and seconds.
    """
    if options["trace"] is not None and options["trace"] < 1:
        raise UsageError(f"--trace {options['trace']}: it must be from 1")
    check_started_by_launcher()
    job = job_of(context)
    if options["adapts"] is not None:
        job = job.changed(adapt=(job.adapt or AdaptConfig()) if options["adapts"] else None)
    try:
        run = train_job(
            job,
            options["run"],
            resume=options["resume"],
            given=_given_options(context),
            stop_at=options["stop_at"],
            trace=options["trace"] or 0,
            observers=[Reporter(), *_loggers(options["logger"])],
            enforce=options["enforce"],
        )
        if options["report"] and run and run.engine.device_id == 0:
            from spmd_engine.cli.report import write_report

            write_report([run.folder])
    except SystemExit as stopped:  # by a signal, after a save
        if options["requeue"] and stopped.code in {128 + number for number in ENDING if number != signal.SIGINT}:
            sys.exit(REQUEUE)
        raise


def _loggers(names: Sequence[str]) -> list[Observer]:
    if not names:
        return []
    from spmd_engine.training.loggers import logger_named

    return [logger_named(name) for name in names]


def job_of(context: click.Context) -> TrainConfig:
    """The job that a command line of ``train`` describes, with the values of its file or of the run that it resumes."""
    options = context.params
    return job_to_train(
        _given_options(context),
        permit=lambda model, named: permitted(model, named, options["trust_code"]),
        plans=options["mesh"] == AUTO,
        **{name: options[name] for name in ("run", "resume", "config", "plan")},
    )


def _given_options(context: click.Context) -> dict[str, Any]:
    """The given options of the job, without ``--mesh auto``."""
    return values_given({name: value for name, value in context.params.items() if (name, value) != ("mesh", AUTO)})
