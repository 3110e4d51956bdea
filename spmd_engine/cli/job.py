"""What ``train`` trains: a model as the options compose it, or a page of ``strategies/``, with its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from spmd_engine.cli.composition import COMPOSITION, build_engine
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.optimizers import SGD, AdamW, Optimizer, WarmupCosine
from spmd_engine.errors import UsageError
from spmd_engine.strategies import strategy_named
from spmd_engine.training.data import Corpus, load_corpus
from spmd_engine.training.trainer import Trainer
from spmd_engine.training.windows import BytePairs, BytePairSequences, Windows, data_for

PAGE_MODEL = "mlp"  #: what ``--model`` says of any page: each has its own small model
_CHOSEN = [name for name in COMPOSITION if not name.startswith("group_")]  # options without a meaning for pages
_WIDTH, _HIDDEN, _HEADS, _LENGTH = 64, 256, 4, 16


@dataclass(frozen=True)
class Job:
    """An engine, and what it learns from."""

    engine: ShardedEngine
    corpus: Corpus
    data: Corpus | Windows
    context: int  #: tokens of a sample
    writes: bool  #: whether it is a model of text

    @property
    def parameter_count(self) -> int:
        """Of the whole model. Collective, where the engine must ask for shapes."""
        return sum(prod(self.engine.global_shape(name)) for name in self.engine.names)


def open_job(options: Mapping[str, Any], mesh: Mesh) -> Job:
    """The engine and data that the options of ``train`` describe. Collective."""
    if options.get("strategy"):
        return _page(options, mesh)
    engine = build_engine(options, mesh, device=options["device"])
    corpus = load_corpus(mesh.group(), options["data"], engine.model.context)
    data = data_for(engine.model, corpus, options["dtype"])
    return Job(engine, corpus, data, engine.model.context, bool(engine.model.vocabulary))


def _page(options: Mapping[str, Any], mesh: Mesh) -> Job:
    name = options["strategy"]
    page = strategy_named(name)
    if options["model"] != PAGE_MODEL:
        raise UsageError(f"--strategy {name} has a small model of its own: leave --model out, or give {PAGE_MODEL}")
    if composed := [each for each in _CHOSEN if options.get(each) not in (None, False, "none")]:
        listed = ", ".join("--" + each.replace("_", "-") for each in composed)
        raise UsageError(f"--strategy {name} is one strategy, whole: it does not go with {listed}")
    if options["device"] != "cpu" or options["dropout"]:
        raise UsageError(f"--strategy {name}: these pages are NumPy alone, and without dropout")
    missing = [axis for axis in page.axes if axis not in mesh.axes]
    if missing:
        wanted = ",".join(f"{axis}=N" for axis in page.axes)
        raise UsageError(f"--strategy {name} with --mesh {mesh}: it needs --mesh {wanted}")
    second = _HEADS if "heads" in page.sizes else _HIDDEN
    engine = page(_WIDTH, second, mesh, options["dtype"])
    engine.initialize(options["seed"])
    corpus = load_corpus(mesh.group(), options["data"], 1)
    if page.sample == "b s d":
        data: Windows = BytePairSequences(corpus, _LENGTH * _WIDTH, options["dtype"], width=_WIDTH)
    else:
        data = BytePairs(corpus, _WIDTH, options["dtype"])
    return Job(engine, corpus, data, 1, False)


def make_trainer(options: Mapping[str, Any], job: Job) -> Trainer:
    """The trainer that the options of ``train`` describe."""
    optimizer: Optimizer
    if options["optimizer"] == "adamw":
        optimizer = AdamW(weight_decay=options["weight_decay"])
    else:
        optimizer = SGD(options["momentum"], options["weight_decay"])

    def batches(step: int):
        return job.data.batch(
            job.engine,
            step,
            size=options["batch_size"],
            micro_batches=options["micro_batches"],
            context=job.context,
            seed=options["seed"],
        )

    rate = WarmupCosine(options["learning_rate"], options["steps"], options["warmup"])
    return Trainer(job.engine, optimizer, batches, rate, grad_clip=options["grad_clip"])
