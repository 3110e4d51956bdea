"""``train``: the main job."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spmd_engine.cli.options import build_engine, check_option, device_option, mesh_option, open_mesh, read_config
from spmd_engine.cli.terminal import console
from spmd_engine.comm.agreement import on_rank_zero
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.optimizers import SGD, AdamW, Optimizer, WarmupCosine
from spmd_engine.errors import UsageError
from spmd_engine.training.checkpoint import load_checkpoint, save_checkpoint
from spmd_engine.training.data import Corpus, decode, encode, load_corpus
from spmd_engine.training.generate import generate
from spmd_engine.training.trainer import StepReport, Trainer

POSITIVE = click.IntRange(min=1)
NOT_NEGATIVE = click.FloatRange(min=0.0)
#: Options that say how this time is computed, not what: they are not taken over by --resume.
OF_THIS_TIME = {"mesh", "run", "resume", "device", "check", "sequence_parallel"}


@click.command(short_help="Train a language model.")
@click.option("--model", default="gpt-nano", show_default=True, help="gpt-nano, gpt-mini or gpt2.")
@click.option("--data", metavar="PATH", help="File or folder to learn from. [default: Python's standard library]")
@mesh_option
@click.option("--batch-size", type=POSITIVE, default=16, show_default=True, help="Samples a step, over all ranks.")
@click.option("--micro-batches", type=POSITIVE, default=1, show_default=True, help="Parts of a batch, one by one.")
@click.option("--steps", type=click.IntRange(min=0), default=600, show_default=True, help="Optimizer steps in all.")
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
@click.option("--sequence-parallel", is_flag=True, help="Cut the sequence over 'model' between layers.")
@click.option("--sample", type=click.IntRange(0), default=240, show_default=True, help="Tokens written at the end.")
@click.option("--run", metavar="NAME", help="Folder for results, or its name under runs/. [default: MODEL-NUMBER]")
@click.option("--resume", is_flag=True, help="Go on with --run, with its own options where none are given.")
@device_option
@check_option
@click.pass_context
def train(context: click.Context, **options: Any) -> None:
    """Train a model on bytes, on however many ranks this was started.

    What is computed depends on the seed and the options, not on the mesh: the same command on 1 and on 8
    ranks gives the same losses, to rounding. Results go to runs/NAME: config.json, metrics.jsonl (an object a
    step) and a checkpoint, from which --resume goes on and 'generate' and 'infer' answer.
    """
    if options["resume"]:
        if not options["run"]:
            raise UsageError("--resume needs --run NAME: which run shall go on?")
        given = {k for k in options if context.get_parameter_source(k) is not ParameterSource.DEFAULT}
        saved = read_config(_folder(options["run"]))
        options |= {k: v for k, v in saved.items() if k in options and k not in given | OF_THIS_TIME}
    with open_mesh(options["mesh"], check=options["check"]) as mesh:
        _train(options, mesh)


def _train(options: dict[str, Any], mesh: Mesh) -> None:
    engine = build_engine(options, mesh, device=options["device"])
    _check_batch(options, engine)
    corpus = load_corpus(mesh.group(), options["data"], engine.model.context)
    trainer = _make_trainer(options, engine, corpus)
    folder = Path(on_rank_zero_text(mesh, lambda: str(_open_folder(options, corpus))))
    if options["resume"]:
        facts = load_checkpoint(folder, engine, trainer.optimizer)
        trainer.steps_done = facts["step"]
        if facts["corpus_sha256"] != corpus.sha256:
            raise UsageError(f"{folder}: trained on other files (SHA-256 differs); give the same --data")
    facts = {"model": options["model"], "seed": options["seed"], "corpus_sha256": corpus.sha256}
    with _Reporter(options, engine, corpus, folder, trainer.steps_done) as reporter:
        validation = corpus.validation_batches(
            engine, samples=options["eval_samples"], size=options["batch_size"], context=engine.model.context
        )
        loss = trainer.evaluate(validation)
        reporter.evaluated(trainer.steps_done, loss)
        for report in trainer.run(options["steps"]):
            last = report.step == options["steps"]
            if last or options["eval_every"] and report.step % options["eval_every"] == 0:
                loss = trainer.evaluate(validation)
                report = StepReport(**{**report.as_dict(), "validation_loss": loss})
            reporter.stepped(report)
        save_checkpoint(folder, engine, trainer.optimizer, step=trainer.steps_done, **facts)
        prompt = "def "
        text = decode(generate(engine, encode(prompt), options["sample"], temperature=0.6, seed=options["seed"]))
        reporter.finished(prompt + text if options["sample"] else "", loss)


def _check_batch(options: dict[str, Any], engine: LayeredEngine) -> None:
    smallest, parts = options["batch_size"] // options["micro_batches"], engine.batch_parts()
    if smallest < parts:
        raise UsageError(
            f"--batch-size {options['batch_size']} in {options['micro_batches']} micro-batch(es) gives {smallest} "
            f"sample(s) each, fewer than the {parts} ranks of axis 'data'. Raise --batch-size to "
            f"{parts * options['micro_batches']} or more, or take a smaller data axis in --mesh"
        )


def _make_trainer(options: dict[str, Any], engine: LayeredEngine, corpus: Corpus) -> Trainer:
    optimizer: Optimizer
    if options["optimizer"] == "adamw":
        optimizer = AdamW(weight_decay=options["weight_decay"])
    else:
        optimizer = SGD(options["momentum"], options["weight_decay"])

    def batches(step: int):
        return corpus.batch(
            engine,
            step,
            size=options["batch_size"],
            micro_batches=options["micro_batches"],
            context=engine.model.context,
            seed=options["seed"],
        )

    rate = WarmupCosine(options["learning_rate"], options["steps"], options["warmup"])
    return Trainer(engine, optimizer, batches, rate, grad_clip=options["grad_clip"])


def on_rank_zero_text(mesh: Mesh, make) -> str:
    """A short text that rank 0 makes, on every rank."""
    import numpy as np

    text = on_rank_zero(mesh.group(), make)
    data = np.frombuffer(text.encode(), np.uint8) if text is not None else None
    return mesh.broadcast(data, label="agreement").tobytes().decode()


def _folder(run: str) -> Path:
    return Path(run) if "/" in run else Path("runs") / run


def _open_folder(options: dict[str, Any], corpus: Corpus) -> Path:
    """On rank 0: make the run's folder and write config.json; or, to resume, see that they are there."""
    if options["resume"]:
        return _folder(options["run"])
    if options["run"]:
        folder = _folder(options["run"])
        if (folder / "config.json").exists():
            raise UsageError(f"{folder} holds a run already; give --resume to go on with it, or another --run")
    else:
        number = 1
        while (folder := Path("runs") / f"{options['model']}-{number}").exists():
            number += 1
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in options.items() if k not in ("run", "resume")}
    config["corpus"] = {"files": corpus.files, "sha256": corpus.sha256}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


class _Reporter:
    """What people see of a run, on rank 0 alone: a bar or lines, and ``metrics.jsonl``."""

    def __init__(self, options, engine: LayeredEngine, corpus: Corpus, folder: Path, done: int) -> None:
        self.speaks = engine.device_id == 0
        self.options, self.folder, self.done = options, folder, done
        self.first = self.last = None
        self.console = console() if self.speaks else None
        self.bar: Progress | None = None
        if self.speaks:
            mesh = engine.mesh
            self._say(
                f"{options['model']}: {engine.model.parameter_count:,} parameters, {options['dtype']}, mesh {mesh} "
                f"on {mesh.node_count} node(s); {len(corpus.train):,} tokens from {corpus.files} files"
            )

    def __enter__(self) -> _Reporter:
        if not self.speaks:
            return self
        self.metrics = _open_metrics(self.folder / "metrics.jsonl", self.done)
        if self.console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("training", total=self.options["steps"], completed=self.done)
        (self.bar or nullcontext()).__enter__()
        return self

    def __exit__(self, *error) -> None:
        if self.speaks:
            (self.bar or nullcontext()).__exit__(*error)
            self.metrics.close()

    def evaluated(self, step: int, loss: float) -> None:
        if self.speaks:
            self._say(f"step {step:>5}  validation loss {loss:.4f} nats per byte")

    def stepped(self, report: StepReport) -> None:
        if not self.speaks:
            return
        self.metrics.write(json.dumps(report.as_dict()) + "\n")
        self.metrics.flush()
        text = f"loss {report.loss:.4f}  {report.tokens_per_second:,.0f} tokens/s"
        if self.bar:
            self.bar.update(self.task, advance=1, description=text)
        elif report.step % max(1, self.options["steps"] // 20) == 0:
            self._say(f"step {report.step:>5}  {text}")
        if report.validation_loss is not None:
            self.evaluated(report.step, report.validation_loss)

    def finished(self, text: str, loss: float) -> None:
        if not self.speaks:
            return
        if text:
            self._say(f"\n--- a sample of what it writes ---\n{text}\n----------------------------------\n")
        self._say(f"validation loss {loss:.4f} nats per byte; results in {self.folder}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def _open_metrics(path: Path, done: int):
    """The file to append to, without what a run that was broken off wrote beyond its checkpoint."""
    kept = []
    if done and path.exists():
        kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= done]
    path.write_text("".join(line + "\n" for line in kept))
    return path.open("a")
