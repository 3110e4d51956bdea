"""``train``: the main job."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from spmd_engine.arrays.precision import dtype_of
from spmd_engine.cli.options import (
    LongCommand,
    chosen_settings,
    options_of,
    permitted,
    rare_option,
    trust_option,
    values_given,
)
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.world import world
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.jobs.run_job import train as train_job
from spmd_engine.observability.progress import Reporter
from spmd_engine.runtime.launchers import check_started_by_launcher
from spmd_engine.runtime.signals import ENDING, REQUEUE
from spmd_engine.training.adapt_config import AdaptConfig
from spmd_engine.training.observers import Observer
from spmd_engine.training.run_folder import read_job, read_run, run_folder
from spmd_engine.training.train_config import FIXED, TrainConfig
from spmd_engine.training.workload import PAGE_MODEL

_RESUME = f"""Continue the run --run from its last save, with its own options and those given here. Its mesh is not
kept, and options that are impossible on the new one are dropped. With more --steps, the learning rate keeps its curve,
unless --decay-steps is given, too. What cannot change: {", ".join(FIXED)}."""


@click.command(cls=LongCommand, short_help="Train a model of text, or of images.")
@click.option("--run", metavar="NAME", help="Folder for results, or its name under runs/. [default: MODEL-NUMBER]")
@click.option("--resume", is_flag=True, help=_RESUME)
@click.option("--config", metavar="FILE", help="A job in JSON, such as the config.json of a run; options override it.")
@click.option("--plan", metavar="FILE", help="Spread the model as in a file of 'plan --output'; or: --mesh auto.")
@rare_option("--stop-at", type=int, metavar="STEP", help="Save and stop after this step. [default: the last]")
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
@rare_option("--trace", metavar="STEPS", type=int, help="Record this many steps in trace.json.")
@rare_option(
    "--enforce/--no-enforce",
    default=True,
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
    options, values, named_in = context.params, _given_options(context), ""

    def with_code(job: TrainConfig) -> TrainConfig:
        return job.changed(model=permitted(job.model, values.get("model"), options["trust_code"]))

    if options["resume"]:
        if not options["run"] or options["config"]:
            raise UsageError("--resume needs --run NAME, and takes its options from there, not from --config")
        return with_code(read_run(options["run"])).resumed(str(run_folder(options["run"])), **values)
    if options["plan"]:
        values, named_in = planned_values(options["plan"], values, options["trust_code"])
    if options["config"]:
        job = with_code(read_job(options["config"])).with_options(**values)
    else:
        job = TrainConfig.of(**values)
    if named_in:
        job = job.changed(model=replace(job.model, named_in=named_in))
    if job.strategy and options["model"] is None and not options["config"]:
        job = job.with_options(model=PAGE_MODEL)
    return planned_here(job, values) if options["mesh"] == AUTO else job


def _given_options(context: click.Context) -> dict[str, Any]:
    """The given options of the job, without ``--mesh auto``."""
    return values_given({name: value for name, value in context.params.items() if (name, value) != ("mesh", AUTO)})


# --- ``train --plan FILE`` and ``train --mesh auto``: a job whose composition is planned


AUTO = "auto"  #: the value of --mesh for a planned mesh
LORA = tuple(chosen_settings(TrainConfig, ["lora"]))
#: Options that a plan decides; another value of them contradicts it.
DECIDED = (
    "mesh", "zero", "sequence_parallel", "context_method", "schedule", "chunks", "stages", "recompute",
    "shares", "state_shares", "min_tensor_size", "rank_order", "offload", "assign", "micro_batches",
    "batch_size", "optimizer", "precision", *LORA,
)  # fmt: skip


def planned_values(path: str, given: Mapping[str, Any], trust: bool) -> tuple[dict[str, Any], str]:
    """The given options of a job and those of a plan's file, read on rank 0, and ``named_in`` of its model. Collective
    over the world.

    ``trust``: code that the file names may run. Raises UsageError for a plan for other ranks or another model, for
    given options that contradict the plan, and for code that is not permitted.
    """
    from spmd_engine.planning.plan_result import PlanFile

    with Mesh(world()) as mesh:
        text = text_from_rank_zero(mesh.group(), lambda: json.dumps(PlanFile.read(path).as_json()))
        ranks = mesh.size
    plan = PlanFile.from_json(json.loads(text), path)
    plan.check(ranks, given.get("model"), path)
    model = permitted(plan.model, given.get("model"), trust)
    if given.get("model") is not None:
        model = model.changed(name=given["model"])
    decided = {
        **plan.composition.as_json(),
        "micro_batches": plan.micro_batches,
        "batch_size": plan.batch_size,
        "optimizer": plan.optimizer,
        "precision": plan.model.dtype,
    }
    if (lora := plan.model.lora) is not None:
        decided |= {name: getattr(lora, name.removeprefix("lora_")) for name in LORA}
    for name in DECIDED:
        if name in given and given[name] != decided.get(name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} {given[name]} with --plan {path}, which has {decided.get(name)}: omit one of them"
            )
    values = {"model": model.name, **decided, **{n: v for n, v in given.items() if n not in DECIDED}}
    return values, model.named_in


def planned_here(job: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """The job with the fastest composition for the ranks of the world, planned on rank 0. Collective over the world.

    Given options of the composition stay, and so do the micro-batches of the job, which affect the results.
    Raises UsageError if no plan fits.
    """
    if job.strategy:
        raise UsageError(f"--mesh {AUTO}: --strategy {job.strategy} has a mesh of its own; omit --mesh auto")
    with Mesh(world()) as mesh:
        text = text_from_rank_zero(mesh.group(), lambda: json.dumps(_plan(job, mesh.size, given)))
    return job.changed(composition=ParallelConfig.from_json(json.loads(text), f"--mesh {AUTO}"))


def unplanned(composition: ParallelConfig) -> ParallelConfig:
    """A composition without the options that a planner searches for."""
    return composition.changed(
        mesh=None, zero=None, sequence_parallel=False, schedule=None, chunks=None, stages=None, recompute="none"
    )


def _plan(job: TrainConfig, ranks: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Plan the composition on rank 0, and return it as JSON."""
    from spmd_engine.planning.machine.files import default_machine
    from spmd_engine.planning.plan_result import Request
    from spmd_engine.planning.planner import find_plan
    from spmd_engine.units import readable_bytes, readable_seconds

    names = ("zero", "sequence_parallel", "schedule", "chunks", "recompute")
    fixed = {name: getattr(job.composition, name) for name in names if name in given}
    fixed["micro_batches"] = job.data.micro_batches
    base = unplanned(job.composition)
    result = find_plan(
        Request(
            job.model.build(job.composition),
            default_machine(),
            [ranks],
            [job.data.batch_size],
            fixed=fixed,
            dtype=dtype_of(job.model.dtype),
            optimizer=job.training.optimizer,
            base=base,
            seconds=5.0,
        )
    )
    if result.plan is None:
        raise UsageError(f"--mesh {AUTO}: {result.why_not}")
    evaluation = result.evaluation
    seconds = evaluation.seconds if evaluation else result.plan.seconds
    memory = evaluation.analysis.peak_bytes if evaluation else result.plan.memory
    click.echo(
        f"spmd_engine: planned: {result.plan.candidate}; a step {readable_seconds(seconds)}, "
        f"{readable_bytes(memory)} on the rank that holds most",
        err=True,
    )
    return result.plan.candidate.composition(base).as_json()
