"""``train``: the main job."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from spmd_engine.cli.composition import COMPOSITION, check_composition, composition_options
from spmd_engine.cli.job import PAGE_MODEL, make_trainer, open_job
from spmd_engine.cli.options import (
    check_option,
    device_option,
    mesh_option,
    open_mesh,
    read_config,
    run_folder,
)
from spmd_engine.cli.report import Reporter
from spmd_engine.comm.agreement import on_rank_zero, text_from_rank_zero
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.world import world
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.errors import UsageError
from spmd_engine.models.names import MODELS
from spmd_engine.signals import StopFlag
from spmd_engine.strategies import STRATEGIES, default_axes, strategy_named
from spmd_engine.training.checkpoint import PARAMETERS, load_checkpoint, save_checkpoint
from spmd_engine.training.data import Corpus, decode, encode
from spmd_engine.training.generate import generate
from spmd_engine.training.trace import Trace
from spmd_engine.training.trainer import StepReport, Trainer

POSITIVE = click.IntRange(min=1)
NOT_NEGATIVE = click.FloatRange(min=0.0, max=1e30)  # the bound keeps nan and inf out
#: Options that say how this time is computed, not what: they are not taken over by --resume.
OF_THIS_TIME = {"mesh", "run", "resume", "stop_at", "trace", "device", "check", *COMPOSITION} - {"compress"}
PROMPT = "def "


@click.command(short_help="Train a language model.")
@click.option("--model", default="gpt-nano", show_default=True, help=f"One of {', '.join(MODELS)}.")
@click.option("--data", metavar="PATH", help="File or folder to learn from. [default: Python's standard library]")
@mesh_option
@click.option("--batch-size", type=POSITIVE, default=16, show_default=True, help="Samples a step, over all ranks.")
@click.option("--micro-batches", type=POSITIVE, default=1, show_default=True, help="Parts of a batch, one by one.")
@click.option("--steps", type=click.IntRange(min=0), default=600, show_default=True, help="Optimizer steps in all.")
@click.option("--stop-at", type=POSITIVE, help="Stop, to be resumed, after this step. [default: --steps]")
@click.option("--save-every", type=click.IntRange(min=0), default=100, show_default=True, help="Steps; 0: at the end.")
@click.option("--learning-rate", type=NOT_NEGATIVE, default=4e-3, show_default=True, help="At its peak.")
@click.option("--warmup", type=click.IntRange(min=0), default=50, show_default=True, help="Steps up to the peak.")
@click.option("--optimizer", type=click.Choice(["adamw", "sgd"]), default="adamw", show_default=True)
@click.option("--momentum", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Of sgd.")
@click.option("--weight-decay", type=NOT_NEGATIVE, default=0.1, show_default=True, help="None on norms, biases.")
@click.option("--grad-clip", type=NOT_NEGATIVE, default=1.0, show_default=True, help="Largest norm; 0: any.")
@click.option("--dropout", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of parameters, samples and dropout.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@click.option("--eval-every", type=click.IntRange(min=0), default=100, show_default=True, help="Steps; 0: at the end.")
@click.option("--eval-samples", type=POSITIVE, default=64, show_default=True, help="Held-out samples.")
@click.option("--sample", type=click.IntRange(0), default=240, show_default=True, help="Tokens written at the end.")
@click.option("--run", metavar="NAME", help="Folder for results, or its name under runs/. [default: MODEL-NUMBER]")
@click.option("--resume", is_flag=True, help="Go on with --run, with its own options but --mesh.")
@click.option("--trace", metavar="STEPS", type=click.IntRange(min=1), help="Trace so many steps to trace.json.")
@click.option("--strategy", metavar="NAME", help=f"Train a page of strategies/ instead: {', '.join(STRATEGIES)}.")
@composition_options
@device_option
@check_option
@click.pass_context
def train(context: click.Context, **options: Any) -> None:
    """Train a model on bytes, on however many ranks this was started.

    What is computed depends on the seed and the options, not on the mesh: the same command on 1 and on 8
    ranks gives the same losses, to rounding. Results go to runs/NAME: config.json, metrics.jsonl (an object a
    step) and a checkpoint, from which --resume goes on and 'generate' and 'infer' answer. --resume takes over
    the run's own options, those given here and --mesh excepted, and goes on exactly from its last save; with
    more --steps, the learning rate follows its cosine over the new number.
    """
    if options["resume"]:
        if not options["run"]:
            raise UsageError("--resume needs --run NAME: which run shall go on?")
        given = {k for k in options if context.get_parameter_source(k) is not ParameterSource.DEFAULT}
        saved = read_config(options["run"])
        if options["model"] != saved["model"] and "model" in given:
            raise UsageError(f"{options['run']} is a {saved['model']}; --model {options['model']} cannot go on with it")
        options |= {k: v for k, v in saved.items() if k in options and k not in given | OF_THIS_TIME}
    if options["strategy"] and context.get_parameter_source("model") is ParameterSource.DEFAULT:
        options["model"] = PAGE_MODEL
    with _open_mesh(options) as mesh:
        if not options["strategy"]:
            check_composition(options, mesh.axes)
        _train(options, mesh)


def _open_mesh(options: dict[str, Any]) -> Mesh:
    """The mesh that was asked for; of a page of strategies, one with its axes."""
    if options["strategy"] and not options["mesh"]:
        return Mesh(check=options["check"], **default_axes(strategy_named(options["strategy"]), world().size))
    return open_mesh(options["mesh"], check=options["check"])


def _train(options: dict[str, Any], mesh: Mesh) -> None:
    job = open_job(options, mesh)
    engine, corpus = job.engine, job.corpus
    _check_batch(options, engine)
    trainer = make_trainer(options, job)
    folder = Path(text_from_rank_zero(mesh.group(), lambda: _open_folder(options)))
    if options["resume"]:
        _load(folder, trainer, corpus)
    else:
        on_rank_zero(mesh.group(), lambda: _write_config(folder, options, corpus))
    stop = min(options["steps"], options["stop_at"] or options["steps"])
    facts = {"model": options["model"], "seed": options["seed"], "corpus_sha256": corpus.sha256}

    def save() -> None:
        on_rank_zero(mesh.group(), lambda: _write_config(folder, options, corpus))
        save_checkpoint(folder, engine, trainer.optimizer, step=trainer.steps_done, **facts)

    validation = job.data.validation_batches(
        engine, samples=options["eval_samples"], size=options["batch_size"], context=job.context
    )
    with Reporter(options, job, folder, trainer.steps_done, stop) as reporter, StopFlag() as trainer.stop:
        loss = trainer.evaluate(validation)
        reporter.evaluated(trainer.steps_done, loss)
        for report in _traced(trainer, stop, options["trace"], folder):
            last, signal = report.step == stop, trainer.stop.taken
            if last or not signal and options["eval_every"] and report.step % options["eval_every"] == 0:
                loss = trainer.evaluate(validation)
                report = replace(report, validation_loss=loss)
            reporter.stepped(report)
            if last or signal or options["save_every"] and report.step % options["save_every"] == 0:
                save()
        if trainer.stop.taken:
            reporter.interrupted(trainer.stop.taken)
            sys.exit(128 + trainer.stop.taken)
        if stop == 0:
            save()
        text = ""
        if options["sample"] and job.writes:
            text = PROMPT + decode(generate(engine, encode(PROMPT), options["sample"], seed=options["seed"]))
        reporter.finished(text, loss)


def _traced(trainer: Trainer, stop: int, steps: int | None, folder: Path) -> Iterator[StepReport]:
    """The training's steps; those that are traced come second, when everything is warm."""
    if not steps:
        yield from trainer.run(stop)
        return
    mesh = trainer.engine.mesh
    yield from trainer.run(min(stop, trainer.steps_done + 1))
    trace = Trace(mesh)
    with trace.of(trainer.engine):
        yield from trainer.run(min(stop, trainer.steps_done + steps))
    text = trace.json()
    on_rank_zero(mesh.group(), lambda: (folder / "trace.json").write_text(text or ""))
    yield from trainer.run(stop)


def _load(folder: Path, trainer: Trainer, corpus: Corpus) -> None:
    """Take up a run where its checkpoint left it."""
    facts = load_checkpoint(folder, trainer.engine, trainer.optimizer)
    if not {"step", "corpus_sha256"} <= set(facts):
        raise UsageError(f"{folder}: its checkpoint does not say how far the training was")
    if facts["corpus_sha256"] != corpus.sha256:
        raise UsageError(f"{folder}: trained on other files (SHA-256 differs); give the same --data")
    trainer.steps_done = facts["step"]


def _check_batch(options: dict[str, Any], engine: ShardedEngine) -> None:
    smallest, parts = options["batch_size"] // options["micro_batches"], engine.batch_parts()
    if smallest < parts:
        raise UsageError(
            f"--batch-size {options['batch_size']} in {options['micro_batches']} micro-batch(es) gives {smallest} "
            f"sample(s) each, fewer than the {parts} ranks that it is cut over. Raise --batch-size to "
            f"{parts * options['micro_batches']} or more, or take a smaller data axis in --mesh"
        )


def _open_folder(options: dict[str, Any]) -> str:
    """On rank 0: the run's folder, made if it is a new run. A run without a checkpoint may be begun again."""
    if options["resume"]:
        return str(run_folder(options["run"]))
    if options["run"]:
        folder = run_folder(options["run"])
        if (folder / PARAMETERS).exists():
            raise UsageError(f"{folder} holds a run already; give --resume to go on with it, or another --run")
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder)
    number = 1
    while True:
        folder = Path("runs") / f"{options['model']}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:  # perhaps by another job, a moment ago
            number += 1
        else:
            return str(folder)


def _write_config(folder: Path, options: dict[str, Any], corpus: Corpus) -> None:
    config = {k: v for k, v in options.items() if k not in ("run", "resume", "stop_at", "trace")}
    config["corpus"] = {"files": corpus.files, "sha256": corpus.sha256}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
