"""A job: all that determines a training run, as one configuration with a form in JSON.

Each field is an option of the command line, unless its ``setting`` says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from spmd_engine.arguments import checked
from spmd_engine.arrays.product_libraries.installed import LIBRARIES
from spmd_engine.arrays.products import NUMPY
from spmd_engine.comm.device_transport import DEVICE_TRANSPORTS
from spmd_engine.comm.pending import TIMEOUT
from spmd_engine.configuration import ConfigField, Configuration, section_of, setting, settings_of
from spmd_engine.engine import ModelConfig, ParallelConfig
from spmd_engine.errors import UsageError, one_of
from spmd_engine.files import output_file
from spmd_engine.foreign import json_at
from spmd_engine.layers.layer import DOCUMENTS
from spmd_engine.models.names import IMAGES
from spmd_engine.models.user_code import is_code, other_code
from spmd_engine.units import SECONDS, seconds_of

VERSION = 1  #: version of the JSON of jobs
MOST = 1 << 24  #: samples, and micro-batches: more is a mistake
LARGEST = 1e30  #: the largest rate, decay or limit
LARGEST_FACTOR = 1e6  #: the largest factor or threshold of the adapter: more is a mistake
AUGMENT = ("none", "shift", "shift-flip")  #: how training images may change at random


@dataclass(frozen=True)
class DataConfig(Configuration):
    """The training data, and their batches."""

    path: str | None = setting(
        None,
        option="data",
        common=True,
        metavar="PATH",
        unset="the source of Python's standard library; for images scikit-learn's digits",
        help="What to learn from: a file or a folder of text, or a file of tokens from 'data prepare'. For models of "
        "images: a folder with a subfolder of images for each class, a .csv file of paths and labels, .parquet files, "
        "an .npz file (x, y), or a folder of IDX files.",
    )
    columns: str | None = setting(
        None,
        metavar="WHAT=NAME",
        unset="the usual names",
        help="Columns or keys of the rows of texts: text=article, or prompt=question,completion=answer.",
    )
    batch_size: int = setting(
        16, least=1, most=MOST, fixed=True, common=True, of_images=64, help="Samples a step, over all ranks."
    )
    micro_batches: int = setting(1, least=1, most=MOST, help="Parts of a batch, which are computed in turn.")
    eval_samples: int = setting(
        64, least=1, most=MOST, of_images=10_000, help="Held-out samples of an evaluation; for images, at most."
    )
    length: int | None = setting(
        None,
        least=1,
        fixed=True,
        common=True,
        old_names=("sequence",),
        unset="the model's context",
        help="Tokens of a sample.",
    )
    documents: str | None = setting(
        None,
        choices=DOCUMENTS,
        fixed=True,
        unset="joined, but instructions apart",
        help="How documents in a file of tokens share a sample.",
    )
    augment: str = setting(
        "none",
        choices=AUGMENT,
        help="How training images change at random: shifted by up to an eighth each way, and mirrored.",
    )


@dataclass(frozen=True)
class StepConfig(Configuration):
    """The updates of parameters, and the actions between steps."""

    steps: int = setting(600, least=0, common=True, of_images=100, help="Optimizer steps in all.")
    learning_rate: float = setting(
        4e-3,
        least=0,
        most=LARGEST,
        common=True,
        of_images=0.01,
        help="Learning rate at its peak; a cosine decays it to a tenth of that.",
    )
    warmup: int | None = setting(
        None,
        least=0,
        unset="50, at most a tenth of --decay-steps",
        help="Steps until the learning rate peaks.",
    )
    decay_steps: int | None = setting(
        None,
        least=1,
        unset="--steps, with which the run began",
        help="Steps until the learning rate is at its lowest, where it then stays.",
    )
    optimizer: str = setting("adamw", choices=("adamw", "sgd"), fixed=True, help="AdamW, or SGD with momentum.")
    momentum: float = setting(0.9, least=0, most=1, help="Momentum of sgd.")
    weight_decay: float = setting(0.1, least=0, most=LARGEST, help="Weight decay; norms and biases have none.")
    grad_clip: float = setting(1.0, least=0, most=LARGEST, help="Largest norm of the whole gradient; 0: no limit.")
    max_skipped: int = setting(
        3,
        least=0,
        help="Steps in a row that may be skipped because a loss or a gradient is not finite; then the run ends.",
    )
    check_replicas_every: int = setting(
        100, least=0, help="Steps between checks that replicas hold equal bits; 0: never."
    )
    eval_every: int = setting(100, least=0, help="Steps between evaluations; 0: only at the end.")
    save_every: int = setting(100, least=0, common=True, help="Steps between checkpoints; 0: only at the end.")
    keep: int = setting(2, least=1, help="Complete checkpoints to keep.")
    save_in_background: bool = setting(False, help="Continue training while a checkpoint is being written.")
    go_on_unsaved: bool = setting(False, help="Continue if a save fails; the last one must succeed.")


@dataclass(frozen=True)
class AdaptConfig(Configuration):
    """When a run observes its ranks, what it notices, and which changes of its shape are worth their cost: the interval
    and the thresholds of the monitor, and the limits of the policy."""

    every: str = setting(
        "20", metavar="STEPS|TIME", help="Interval between observations: a number of steps, or a time such as 30s."
    )
    load_imbalance: float = setting(
        0.05,
        least=0,
        most=LARGEST_FACTOR,
        help="Threshold of the load imbalance, the part by which the longest computation of a rank exceeds the mean.",
    )
    memory_pressure: float = setting(
        0.9, least=0, most=1, help="Threshold of the memory pressure, the part of its memory that a rank uses."
    )
    communication_overhead: float = setting(
        0.3,
        least=0,
        most=1,
        help="Threshold of the communication overhead, the part of a step in which ranks move data.",
    )
    least_gain: float = setting(
        0.05, least=0, below=1, help="Hysteresis: the least part by which a change must shorten a step."
    )
    margin: float = setting(
        2.0, least=1, most=LARGEST_FACTOR, help="A change must save this many times its cost over the remaining steps."
    )
    least_stay: int = setting(20, least=0, help="Steps between two changes.")
    most_loss: float = setting(
        0.0115, least=0, below=1, help="The most that all changes may lose if none of them pays, as a part of the time."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(self.interval):
            raise UsageError(f"every is {self.every!r}: it must be above 0, as in 20 or 30s")

    @property
    def interval(self) -> tuple[int, float]:
        """The interval between observations in steps, and in seconds; one of them is 0."""
        if self.every.isdecimal():
            return int(self.every), 0.0
        return 0, seconds_of(self.every, "every")


@dataclass(frozen=True)
class CorpusFacts(Configuration):
    """The files of a corpus: equal for equal data."""

    files: int = setting(0, least=0)  #: their number
    sha256: str = ""  #: digest of their names, sizes and contents, in hexadecimal digits


@dataclass(frozen=True)
class TrainConfig(Configuration):
    """A training run: equal jobs on equal data give equal results, to rounding, with any composition."""

    version: int = setting(VERSION, option=None, help="Version of this format.")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: StepConfig = StepConfig()
    composition: ParallelConfig = ParallelConfig()
    strategy: str | None = setting(
        None,
        metavar="NAME",
        fixed=True,
        unset="the model above",
        help="A page of strategies/, with a small model of its own, instead of a model.",
    )
    adapt: AdaptConfig | None = setting(
        None,
        prefix="adapt_",
        unset="the shape stays, unless migrate asks for another",
        help="An object: when the run changes its shape, by the measured speeds of its ranks.",
    )
    device: str = setting("cpu", common=True, metavar="cpu|cuda", help="Where arrays are: cpu (NumPy) or cuda (CuPy).")
    device_memory: float | None = setting(
        None,
        least=0.01,
        most=1.0,
        unset="all, or if ranks share a GPU, an equal part of 95%",
        help="Fraction of a GPU's memory that each rank may use.",
    )
    transport: str = setting(
        "auto",
        choices=DEVICE_TRANSPORTS,
        help="How arrays on GPUs travel: by NCCL, by MPI (if it reads their memory), or staged in host memory; auto "
        "takes the first of these that all ranks have.",
    )
    tf32: bool = setting(
        False,
        help="On a GPU, let float32 products round their operands to 11 bits (TF32), which is several times faster.",
    )
    products: str = setting(
        "auto",
        choices=("auto", NUMPY, *LIBRARIES),
        help="The library of matrix products in float32 and bfloat16: auto takes the fastest that is installed, as "
        "measured once a machine, by dtype and size.",
    )
    check: bool = setting(
        True, help="Compare the calls of all ranks in every collective, so that a mismatch is an error and not a hang."
    )
    deterministic: bool = setting(False, help="Sum in rank order between any number of nodes.")
    timeout: float = setting(
        TIMEOUT,
        least=0.1,
        most=LARGEST,
        unit=SECONDS,
        help="Longest wait for other ranks; after half of it, or a minute, ranks report which ranks they wait for.",
    )
    sample: int = setting(240, least=0, help="Tokens that a model of text writes at the end.")
    corpus: CorpusFacts | None = setting(
        None,
        option=None,
        unset="no condition",
        help="An object, `files` and `sha256`, that the data must match. The config.json of a run has it.",
    )

    @classmethod
    def from_json(cls, content: Any, where: str = "") -> Self:
        """As Configuration.from_json; also reads an old config.json without a version."""
        if isinstance(content, Mapping) and "version" not in content and {"model", "seed", "dtype"} <= set(content):
            return _from_options(cls, content, where)
        if isinstance(content, Mapping) and content.get("version") != VERSION:
            version = json.dumps(content.get("version"))
            raise UsageError(
                f"{where}: version is {version}; this program reads version {VERSION}, as TrainConfig.of(...) writes it"
            )
        return super().from_json(_with_defaults(content), where)

    @classmethod
    @checked()
    def read(cls, path: str | Path) -> Self:
        """The job in a JSON file; raises UsageError, in one line, if it cannot be read or has an invalid value."""
        try:
            content = json_at(path)
        except UsageError as error:
            if not isinstance(error.__cause__, json.JSONDecodeError):
                raise
            raise UsageError(f"{error}; a job is a JSON file, such as the config.json of a run") from error
        return cls.from_json(content, str(path))

    @checked()
    def write(self, path: str | Path) -> None:
        """Write the JSON file that ``read`` reads, completely or not at all; raises UsageError if that fails."""
        with output_file(path, "the job") as file:
            file.write((json.dumps(self.as_json(), indent=2) + "\n").encode())

    @classmethod
    def of(cls, **options: Any) -> Self:
        """A job with these options, as in ``with_options``; the defaults of the others depend on the kind of model."""
        return cls().with_options(**(OF_IMAGES if options.get("model") in IMAGES else {}) | options)

    @property
    def mesh_options(self) -> dict[str, Any]:
        """The options of its ``Mesh`` that are not those of a composition."""
        return {"check": self.check, "timeout": self.timeout, "deterministic": self.deterministic}

    @property
    def shards_itself(self) -> bool:
        """Whether a page of strategies, or an engine of the user's own, shards the model instead of the composition."""
        return bool(self.strategy) or self.model.engine is not None

    def with_options(self, **options: Any) -> Self:
        """This job with other values of fields in any section, by their names on the command line.

        >>> TrainConfig.of(model="gpt-mini", steps=20, zero=3).training.steps
        20

        Raises UsageError for a name that no section has.
        """
        return _changed(self, {_setting(name).path: value for name, value in options.items()})

    def option(self, name: str) -> Any:
        """The value of an option, by its name in ``with_options``."""
        *sections, field = _setting(name).path
        value: Any = self
        for section in sections:
            value = section_of(value, section)
        return getattr(value, field)

    def resumed(self, where: str = "the run", **options: Any) -> Self:
        """The job of a resumed run, with other values of some options; mesh, device, tf32, check and products become
        their defaults. With other ``steps`` the learning rate keeps its curve, unless ``decay_steps`` are given, too.

        Raises UsageError for another value of an option that determines the results (``FIXED``).
        """
        for name in FIXED:
            if name in options and options[name] != self.option(name):
                if name == "model" and is_code(self.model.name):
                    raise other_code(self.model.name, options[name], where)
                raise UsageError(
                    f"{where} was begun with {name} {self.option(name)}: {name} {options[name]} cannot go on with it. "
                    f"Leave it out, or begin another run ({', '.join(FIXED)} stay as they are)"
                )
        if options.get("steps", self.training.steps) != self.training.steps:
            options = {"decay_steps": self.training.decay_steps or max(1, self.training.steps)} | options
        return self.with_options(
            **{"mesh": None, "device": "cpu", "tf32": False, "check": True, "products": "auto"} | options
        )


#: Options that determine the results of a run: a resumed run keeps its values.
FIXED = tuple(name for name, field in settings_of(TrainConfig).items() if field.about.get("fixed"))
#: Defaults for models of images.
OF_IMAGES = {
    name: field.about["of_images"] for name, field in settings_of(TrainConfig).items() if "of_images" in field.about
}


def _changed(configuration: Configuration, values: Mapping[tuple[str, ...], Any]) -> Any:
    """A configuration with other values of its fields and those of its sections, all at once."""
    changes = {path[0]: value for path, value in values.items() if len(path) == 1}
    for section in dict.fromkeys(path[0] for path in values if len(path) > 1):
        within = {path[1:]: value for path, value in values.items() if len(path) > 1 and path[0] == section}
        changes[section] = _changed(section_of(configuration, section), within)
    return configuration.changed(**changes)


def _setting(name: str) -> ConfigField:
    settings = settings_of(TrainConfig)
    if name not in settings:
        name = next((new for new, field in settings.items() if name in field.about.get("old_names", ())), name)
    if name not in settings:
        raise UsageError(f"a job has no option {name!r}; {one_of(name, settings)}")
    return settings[name]


def _with_defaults(content: Any) -> Any:
    """A job's JSON, with the defaults for images if it has a model of images."""
    model = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(model, Mapping) or model.get("name") not in list(IMAGES):  # the name may have any type
        return content
    filled = dict(content)
    for option, value in OF_IMAGES.items():
        section, name = _setting(option).path
        values = filled.get(section, {})
        if isinstance(values, Mapping):
            filled[section] = {name: value, **values}
    return filled


def _from_options(cls: type[TrainConfig], content: Mapping[str, Any], where: str) -> Any:
    """The job of a config.json that is a flat list of options."""
    options = dict(content)
    facts = CorpusFacts.from_json(options.pop("corpus", {}), f"{where}: corpus")
    try:
        job = cls().with_options(**options, corpus=facts)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return job.changed(model=replace(job.model, named_in=where or "a file"))
