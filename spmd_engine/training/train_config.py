"""A job: everything that decides a training run, as one configuration that JSON can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from spmd_engine.comm.pending import TIMEOUT
from spmd_engine.configuration import Configuration, section_of, setting
from spmd_engine.engine.parallel_config import ModelConfig, ParallelConfig
from spmd_engine.errors import UsageError, one_of
from spmd_engine.foreign import json_at
from spmd_engine.layers.layer import DOCUMENTS
from spmd_engine.layers.moe.router_options import RouterOptions
from spmd_engine.models.names import IMAGES
from spmd_engine.training.data.augment import AUGMENT

VERSION = 1  #: of the JSON that jobs are written as
MOST = 1 << 24  #: samples, and parts of them: beyond it is a slip
LARGEST = 1e30  #: of rates and the like
#: Defaults of jobs with a model of images; those of others stand with the fields.
OF_IMAGES = {
    "batch_size": 64,
    "eval_samples": 10_000,
    "steps": 100,
    "learning_rate": 0.01,
    "warmup": 20,
}

#: Options of models that have experts, on which their parameters' shapes hang.
MIXTURE = ("experts", "top_k", "shared_experts", "dense_layers")
#: Options of routers, on which they do not hang.
ROUTER = ("routing", "capacity_factor", "balance_loss", "z_loss", "bias_rate")
#: Options of adapters.
LORA = ("lora_rank", "lora_alpha", "lora_targets")
#: Options that decide what a run computes, by their names for ``TrainConfig.with_options``: it goes on with its own.
FIXED = (
    *("model", "strategy", "dropout", "dtype", "seed", "batch_size", "optimizer"),
    *("vocabulary", "length", "documents"),
    *MIXTURE,
    *LORA,
)
#: Options that have other names than their fields, by the sections within sections where these are.
_SHORT = {
    "model": ("model", "name"),
    "data": ("data", "path"),
    "experts": ("model", "mixture", "experts"),
    "shared_experts": ("model", "mixture", "shared"),
    "dense_layers": ("model", "mixture", "dense"),
    "lora_rank": ("model", "lora", "rank"),
    "lora_alpha": ("model", "lora", "alpha"),
    "lora_targets": ("model", "lora", "targets"),
}


@dataclass(frozen=True)
class DataConfig(Configuration):
    """What is learnt from, and in which pieces."""

    path: str | None = None  #: a file or a folder; None: the source of Python's standard library
    batch_size: int = setting(16, least=1, most=MOST)  #: samples a step, over all ranks
    micro_batches: int = setting(1, least=1, most=MOST)  #: parts of a batch, computed one after the other
    eval_samples: int = setting(64, least=1, most=MOST)  #: held-out samples of an evaluation; of images, at most
    length: int | None = setting(None, least=1)  #: tokens of a sample; None: as many as the model's context
    #: of a file of tokens: how documents share a sample; None: joined, but instructions apart
    documents: str | None = setting(None, choices=DOCUMENTS)
    augment: str = setting("none", choices=AUGMENT)  #: how images to learn from are changed, at random


@dataclass(frozen=True)
class StepConfig(Configuration):
    """How parameters are updated, and what is done between steps."""

    steps: int = setting(600, least=0)  #: optimizer steps in all
    learning_rate: float = setting(4e-3, least=0, most=LARGEST)  #: at its peak; a cosine leads down to a tenth of it
    warmup: int = setting(50, least=0)  #: steps up to the peak
    optimizer: str = setting("adamw", choices=("adamw", "sgd"))  #: adamw, or sgd with momentum
    momentum: float = setting(0.9, least=0, most=1)  #: of sgd
    weight_decay: float = setting(0.1, least=0, most=LARGEST)  #: none on norms and biases
    grad_clip: float = setting(1.0, least=0, most=LARGEST)  #: the largest norm of a gradient; 0: any
    max_skipped: int = setting(3, least=0)  #: steps in a row that may update nothing, since something is not finite
    check_replicas_every: int = setting(100, least=0)  #: steps between comparisons of what ranks hold alike; 0: never
    eval_every: int = setting(100, least=0)  #: steps between evaluations; 0: only at the end
    save_every: int = setting(100, least=0)  #: steps between checkpoints; 0: only at the end
    keep: int = setting(2, least=1)  #: complete checkpoints that stay
    save_in_background: bool = False  #: whether training goes on while a checkpoint is being written
    go_on_unsaved: bool = False  #: whether training goes on when a checkpoint could not be written


@dataclass(frozen=True)
class CorpusFacts(Configuration):
    """What a corpus was read from: equal where the data are."""

    files: int = setting(0, least=0)  #: their number
    sha256: str = ""  #: of their names, sizes and contents, in hexadecimal digits


@dataclass(frozen=True)
class TrainConfig(Configuration):
    """A training run, whole: equal jobs on equal data compute the same, to rounding, whatever the composition."""

    version: int = VERSION  #: of this format
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: StepConfig = StepConfig()
    composition: ParallelConfig = ParallelConfig()
    strategy: str | None = None  #: a page of ``strategies/``, with a small model of its own; None: ``model``
    device: str = "cpu"  #: cpu (NumPy) or cuda (CuPy)
    check: bool = True  #: whether ranks compare what they call in every collective
    deterministic: bool = False  #: whether sums between nodes are in rank order on any number of nodes
    timeout: float = setting(TIMEOUT, least=0.1, most=LARGEST)  #: seconds that a rank waits for others at most
    sample: int = setting(240, least=0)  #: tokens written at the end, by a model of text
    corpus: CorpusFacts | None = None  #: what the data must be; None: whatever is found

    @classmethod
    def from_json(cls, content: Any, where: str = "") -> Self:
        """As Configuration.from_json; a run's config.json from before there were versions is understood, too."""
        if isinstance(content, Mapping) and "version" not in content and {"model", "seed", "dtype"} <= set(content):
            return _from_options(cls, content, where)
        if isinstance(content, Mapping) and content.get("version") != VERSION:
            said = json.dumps(content.get("version"))
            raise UsageError(f"{where}: version is {said}; this program reads version {VERSION}")
        return super().from_json(_with_defaults(content), where)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The job of a JSON file; raises UsageError, in one line, for one that cannot be read or makes no sense."""
        return cls.from_json(json_at(path), str(path))

    def write(self, path: str | Path) -> None:
        """Write what ``read`` reads."""
        Path(path).write_text(json.dumps(self.as_json(), indent=2) + "\n")

    @classmethod
    def of(cls, **options: Any) -> Self:
        """A job with some options of ``with_options``, all else by default: by that of its model's kind."""
        return cls().with_options(**(OF_IMAGES if options.get("model") in IMAGES else {}) | options)

    def with_options(self, **options: Any) -> Self:
        """This job with other values of fields, named as the command line does, whatever section they are in.

        >>> TrainConfig.of(model="gpt-mini", steps=20, zero=3).training.steps
        20

        Raises UsageError for a name that no section has.
        """
        return _changed(self, {_place(name): value for name, value in options.items()})

    def option(self, name: str) -> Any:
        """The value of one of ``with_options``' names."""
        *sections, field = _place(name)
        value: Any = self
        for section in sections:
            value = section_of(value, section)
        return getattr(value, field)

    def resumed(self, where: str = "the run", **options: Any) -> Self:
        """This job, of a run that goes on, with other values of some options; its mesh, device and checks are new ones.

        Raises UsageError for another value of an option that decides what is computed (``FIXED``).
        """
        for name in FIXED:
            if name in options and options[name] != self.option(name):
                raise UsageError(
                    f"{where} was begun with {name} {self.option(name)}: {name} {options[name]} cannot go on with it. "
                    f"Leave it out, or begin another run ({', '.join(FIXED)} stay as they are)"
                )
        return self.with_options(**{"mesh": None, "device": "cpu", "check": True} | options)


def _changed(configuration: Configuration, values: Mapping[tuple[str, ...], Any]) -> Any:
    """A configuration with other values of fields, of its own and in sections within it, all at once."""
    own = {path[0]: value for path, value in values.items() if len(path) == 1}
    for section in dict.fromkeys(path[0] for path in values if len(path) > 1):
        within = {path[1:]: value for path, value in values.items() if len(path) > 1 and path[0] == section}
        own[section] = _changed(section_of(configuration, section), within)
    return configuration.changed(**own)


def _place(name: str) -> tuple[str, ...]:
    """The sections and the field that an option stands for."""
    if name in _SHORT:
        return _SHORT[name]
    kinds = {
        ("model",): ModelConfig,
        ("data",): DataConfig,
        ("training",): StepConfig,
        ("composition",): ParallelConfig,
        (): TrainConfig,
        ("model", "mixture", "router"): RouterOptions,
    }
    for sections, kind in kinds.items():
        if name in {each.name for each in fields(kind)}:
            return *sections, name
    known = (*_SHORT, *(each.name for kind in kinds.values() for each in fields(kind)))
    raise UsageError(f"a job has no option {name!r}; {one_of(name, known)}")


def _with_defaults(content: Any) -> Any:
    """A job's JSON; where its model is one of images, with the defaults that it then has."""
    model = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(model, Mapping) or model.get("name") not in list(IMAGES):  # it may be anything
        return content
    filled = dict(content)
    for option, value in OF_IMAGES.items():
        section, name = _place(option)
        given = filled.get(section, {})
        if isinstance(given, Mapping):
            filled[section] = {name: value, **given}
    return filled


def _from_options(cls: type[TrainConfig], content: Mapping[str, Any], where: str) -> TrainConfig:
    """The job of a config.json that holds the options of one command line, side by side."""
    options = dict(content)
    facts = CorpusFacts.from_json(options.pop("corpus", {}), f"{where}: corpus")
    if options.get("mesh"):
        options["mesh"] = {axis: int(size) for axis, size in (each.split("=") for each in options["mesh"].split(","))}
    try:
        return cls().with_options(**options, corpus=facts)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
