"""``train``: the main job."""

from __future__ import annotations

import signal
import sys
from typing import Any

import click

from spmd_engine.cli.adapters import lora_options
from spmd_engine.cli.composition import composition_options
from spmd_engine.cli.experts import expert_options
from spmd_engine.cli.options import check_option, device_option, field_option, mesh_option, model_option, options_given
from spmd_engine.cli.planned_job import AUTO, planned_here, planned_values
from spmd_engine.cli.report import Reporter
from spmd_engine.engine.parallel_config import ModelConfig
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import DOCUMENTS
from spmd_engine.runtime.signals import REQUEUE
from spmd_engine.strategies import STRATEGIES
from spmd_engine.training.data.augment import AUGMENT
from spmd_engine.training.run_job import read_job, read_run, run_folder
from spmd_engine.training.run_job import train as train_job
from spmd_engine.training.train_config import FIXED, DataConfig, StepConfig, TrainConfig
from spmd_engine.training.workload import PAGE_MODEL

#: Options that say what is done this time; a job knows nothing of them.
OF_THIS_TIME = ("config", "run", "resume", "stop_at", "trace", "plan", "enforce", "requeue")

_ADAMW_OR_SGD = click.Choice(["adamw", "sgd"])
_DTYPES = click.Choice(["float32", "float64"])
_DATA = """File or folder to learn from, or a file of tokens from 'data prepare'; of images an .npz (x, y), a folder of
IDX files, or one with a subfolder of pictures a class. [default: Python's standard library; images: scikit-learn's
digits]"""
_GO_ON = f"""Go on with --run, by its own options and those given here. Its {", ".join(FIXED)} cannot be others; what
of its composition the mesh cannot have is left out."""


@click.command(short_help="Train a model of text, or of images.")
@model_option
@click.option("--data", metavar="PATH", help=_DATA)
@mesh_option
@field_option(DataConfig, "batch_size", help="Samples a step, over all ranks.")
@field_option(DataConfig, "augment", type=click.Choice(AUGMENT), help="How images to learn from are changed.")
@click.option("--length", type=click.IntRange(min=1), help="Tokens of a sample. [default: the model's context]")
@click.option("--documents", type=click.Choice(DOCUMENTS), help="Of a file of tokens: how they share a sample.")
@click.option("--vocabulary", type=click.IntRange(min=1), help="Tokens that a new model knows. [default: the data's]")
@field_option(DataConfig, "micro_batches", help="Parts of a batch, one by one.")
@field_option(StepConfig, "steps", help="Optimizer steps in all.")
@click.option("--stop-at", type=int, help="Stop, to be resumed, after this step. [default: --steps]")
@click.option("--requeue", is_flag=True, help=f"Ended by a signal, exit with {REQUEUE}: batch scripts requeue then.")
@field_option(StepConfig, "max_skipped", help="Steps in a row that may be skipped, as not finite.")
@field_option(StepConfig, "check_replicas_every", help="Steps; 0: never.")
@field_option(StepConfig, "save_every", help="Steps; 0: at the end.")
@field_option(StepConfig, "keep", help="Checkpoints that stay.")
@field_option(StepConfig, "save_in_background", is_flag=True, help="Train on while one is written.")
@field_option(StepConfig, "go_on_unsaved", is_flag=True, help="Also when one cannot be written.")
@field_option(StepConfig, "learning_rate", help="At its peak.")
@field_option(StepConfig, "warmup", help="Steps up to the peak.")
@field_option(StepConfig, "optimizer", type=_ADAMW_OR_SGD)
@field_option(StepConfig, "momentum", help="Of sgd.")
@field_option(StepConfig, "weight_decay", help="None on norms, biases.")
@field_option(StepConfig, "grad_clip", help="Largest norm; 0: any.")
@field_option(ModelConfig, "dropout")
@field_option(ModelConfig, "seed", help="Of parameters, samples and dropout.")
@field_option(ModelConfig, "dtype", type=_DTYPES)
@field_option(StepConfig, "eval_every", help="Steps; 0: at the end.")
@field_option(DataConfig, "eval_samples", help="Held-out samples.")
@field_option(TrainConfig, "deterministic", is_flag=True, help="Sums in rank order between any number of nodes, too.")
@field_option(
    TrainConfig, "timeout", help="Seconds a rank waits for others; after half, who keeps whom waiting is told."
)
@field_option(TrainConfig, "sample", help="Tokens written at the end.")
@click.option("--config", metavar="FILE", help="A job in JSON, like a run's config.json; options override it.")
@click.option("--run", metavar="NAME", help="Folder for results, or its name under runs/. [default: MODEL-NUMBER]")
@click.option("--resume", is_flag=True, help=_GO_ON)
@click.option("--plan", metavar="FILE", help="Spread it as 'plan --output FILE' says; --mesh auto: plan here and now.")
@click.option("--trace", metavar="STEPS", type=int, help="Trace so many steps to trace.json.")
@click.option(
    "--enforce/--no-enforce", default=True, help="Calls and bytes of step 1 must be as foretold; or are told."
)
@click.option("--strategy", metavar="NAME", help=f"Train a page of strategies/ instead: {', '.join(STRATEGIES)}.")
@lora_options
@click.option("--adapter", metavar="FOLDER", help="Begin with adapters that PEFT wrote.")
@expert_options
@composition_options
@device_option
@check_option
@click.pass_context
def train(context: click.Context, **options: Any) -> None:
    """Train a model on bytes, or on images, on however many ranks this was started.

    What is computed depends on the seed and the options, not on the mesh: the same command on 1 and on 8
    ranks gives the same losses, to rounding. Results go to runs/NAME: config.json, metrics.jsonl (an object a
    step) and a checkpoint, from which --resume goes on and 'generate' and 'infer' answer. --resume takes over
    the run's own options, those given here and --mesh excepted, and goes on exactly from its last save; with
    more --steps, the learning rate follows its cosine over the new number. Ctrl-C, SIGTERM or SIGUSR1, to mpiexec
    or to any rank, saves after the step that is under way; a second one ends it at once, and so does one before the
    first step is done.
    """
    if options["trace"] is not None and options["trace"] < 1:
        raise UsageError(f"--trace {options['trace']}: at least one step is traced")
    try:
        train_job(
            job_of(context),
            options["run"],
            resume=options["resume"],
            given=options_given(context),
            stop_at=options["stop_at"],
            trace=options["trace"] or 0,
            observers=[Reporter()],
            enforce=options["enforce"],
        )
    except SystemExit as stopped:  # by a signal, saved
        if options["requeue"] and stopped.code != 128 + signal.SIGINT:
            sys.exit(REQUEUE)
        raise


def job_of(context: click.Context) -> TrainConfig:
    """The job that a command line of ``train`` describes, with what it takes from a file or from the run it resumes."""
    options, given = context.params, options_given(context)
    values = {name: value for name, value in given.items() if name not in OF_THIS_TIME}
    if options["resume"]:
        if not options["run"] or options["config"]:
            raise UsageError("--resume needs --run NAME, and takes its options from there, not from --config")
        return read_run(options["run"]).resumed(str(run_folder(options["run"])), **values)
    if options["plan"]:
        values = planned_values(options["plan"], values)
    auto = values.get("mesh") == AUTO
    if auto:
        values = {name: value for name, value in values.items() if name != "mesh"}
    job = read_job(options["config"]).with_options(**values) if options["config"] else TrainConfig.of(**values)
    if job.strategy and "model" not in given and not options["config"]:
        job = job.with_options(model=PAGE_MODEL)
    return planned_here(job, values) if auto else job
