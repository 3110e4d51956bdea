"""The workload of a job: a model sharded by its composition, or a page of ``strategies/``, with its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_engine.arrays import get_backend
from spmd_engine.arrays.precision import dtype_of
from spmd_engine.comm import Group, Mesh
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, on_rank_zero
from spmd_engine.comm.notation import Spec
from spmd_engine.engine import LayeredEngine, ParallelConfig, ShardedEngine, build_engine, making_on
from spmd_engine.engine.batch import Batch, check_batch
from spmd_engine.engine.distributed import check_dtype, check_mesh, make_engine
from spmd_engine.engine.optimizers import SGD, AdamW, Optimizer, WarmupCosine
from spmd_engine.errors import UsageError
from spmd_engine.models import ImageShape
from spmd_engine.models.decoder import BYTES
from spmd_engine.models.names import IMAGES
from spmd_engine.models.user_code import is_code
from spmd_engine.strategies import strategy_named
from spmd_engine.training.data.array_data import SampledData
from spmd_engine.training.data.corpus import BytePairs, Corpus, data_for, load_corpus
from spmd_engine.training.train_config import StepConfig, TrainConfig
from spmd_engine.training.trainer import Trainer

if TYPE_CHECKING:
    from spmd_engine.formats.token_file import TokenFile
    from spmd_engine.training.data.array_file import LabelledArrays
    from spmd_engine.training.data.images import Images
    from spmd_engine.training.data.token_data import PreparedData

WARMUP = 50  #: most steps until the learning rate peaks, unless a job gives them
PAGE_MODEL = "mlp"  #: the model's name in a job of a page: each page has its own small model
_WIDTH, _HIDDEN, _HEADS, _LENGTH = 64, 256, 4, 16


@dataclass(frozen=True)
class Workload:
    """An engine and its training data."""

    job: TrainConfig
    engine: ShardedEngine
    corpus: Corpus | Images | PreparedData | LabelledArrays
    data: SampledData
    writes: bool = False  #: whether it is a model of text
    token_file: TokenFile | None = None  #: the file of the corpus, if it is a token file
    picture: Callable[[], bytes] | None = None  #: draws the data as a PNG; raises UsageError without Pillow

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model. Collective if ranks must exchange shapes."""
        return sum(prod(self.engine.global_shape(name)) for name in self.engine.names)

    @property
    def validation(self) -> list[Batch]:
        """The batches to evaluate on; none on a rank outside the mesh."""
        data = self.job.data
        if not self.engine.input_sharding:
            return []
        sizes = {"size": data.batch_size, "micro_batches": data.micro_batches}
        return self.data.validation_batches(self.engine, samples=data.eval_samples, **sizes)


def open_workload(job: TrainConfig, mesh: Mesh, placed: bool = True) -> Workload:
    """The engine and the data of a job. Collective. Unless ``placed``, these ranks are outside the engine's mesh.

    Raises UsageError for options that contradict each other, for data other than ``job.corpus``, and for batches with
    fewer samples than ranks.
    """
    if job.tf32 and job.model.dtype != "float32":
        raise UsageError(f"--tf32 with --precision {job.model.dtype}: it is for float32; leave one of them out")
    get_backend(job.device, *mesh.process_on_node, memory=job.device_memory).allow_tf32(job.tf32)
    for option, value in ("documents", job.data.documents), ("length", job.data.length):
        if value is not None and (job.model.name in IMAGES or job.strategy):
            name = job.strategy or job.model.name
            raise UsageError(f"--{option} {value}: {name} learns from no file of tokens; leave it out")
    if job.model.name in IMAGES and not job.strategy:
        workload = _open_images(job, mesh, placed)
    elif is_code(job.model.name) and not job.strategy:
        workload = _open_code(job, mesh, placed)
    elif job.data.augment != "none":
        raise UsageError(f"--augment {job.data.augment}: {job.model.name} learns from no images; leave it out")
    else:
        workload = _open_page(job, mesh) if job.strategy else _open_model(job, mesh, placed)
    if placed:
        check_batch(job.data.batch_size, job.data.micro_batches, Spec.parse(workload.engine.input_sharding), mesh)
    return workload


def _build(job: TrainConfig, mesh: Mesh, placed: bool, drawn: bool = True) -> LayeredEngine:
    return build_engine(job.model, mesh, job.composition, device=job.device, drawn=drawn, placed=placed)


def _check_corpus(job: TrainConfig, corpus: Corpus | Images | PreparedData | LabelledArrays) -> None:
    """Raise UsageError if the job was made for other data, or names columns of data that has no rows of text."""
    if job.data.columns is not None and not (isinstance(corpus, Corpus) and job.data.path):
        raise UsageError(
            f"--columns {job.data.columns}: {job.data.path or 'what is read without --data'} has no rows of text; "
            "leave the option out, or give it to 'data prepare'"
        )
    if job.corpus and job.corpus.sha256 != corpus.sha256:
        usual = "Python's standard library" if isinstance(corpus, Corpus) else "scikit-learn"
        where = job.data.path or f"{usual} here"
        raise UsageError(f"{where}: other files than the job was made for (SHA-256 differs); give the same --data")


def _open_model(job: TrainConfig, mesh: Mesh, placed: bool) -> Workload:
    if job.data.path and _is_token_file(mesh.group(), str(job.data.path)):
        return _open_tokens(job, mesh, placed)
    if job.data.documents is not None:
        raise UsageError(f"--documents {job.data.documents} goes with a file of tokens: 'data prepare' makes one")
    engine = _build(job, mesh, placed, drawn=job.model.path is None)
    if (job.model.path is not None or job.model.code) and engine.model.vocabulary not in (0, BYTES):
        raise UsageError(
            f"--data {job.data.path or 'left out'}: {job.model.name} reads tokens of its own, not bytes; encode the "
            f"text first: data prepare --tokenizer {job.model.name} --output FILE, then --data FILE"
        )
    length = _length(job, engine)
    corpus = load_corpus(mesh.group(), job.data.path, length, _columns(job))
    _check_corpus(job, corpus)
    data = data_for(engine.model, corpus, job.model.dtype, length, job.model.seed)
    return Workload(job, engine, corpus, data, writes=bool(engine.model.vocabulary))


def _columns(job: TrainConfig) -> Mapping[str, str] | None:
    if job.data.columns is None:
        return None
    from spmd_engine.formats.text_documents import parse_columns  # most jobs need none of it

    return parse_columns(job.data.columns)


def _is_token_file(group: Group, path: str) -> bool:
    """Whether rank 0 finds a token file at ``path``. Collective."""
    from spmd_engine.formats.token_file import is_token_file

    is_file = on_rank_zero(group, lambda: is_token_file(path))
    return bool(group.broadcast(np.array(bool(is_file)), group.lowest, label="corpus"))


def _open_tokens(job: TrainConfig, mesh: Mesh, placed: bool) -> Workload:
    """The workload of a token file; its job gets the vocabulary of the file if the weights are random."""
    from spmd_engine.formats.token_file import open_token_file
    from spmd_engine.training.data.token_data import PreparedData, check_file

    file = on_all_ranks(mesh.group(), lambda: open_token_file(str(job.data.path)))
    check_file(mesh.group(), file)
    vocabulary = file.facts.vocabulary
    if job.model.path is None and job.model.code is None and job.model.vocabulary is None:
        job = job.with_options(vocabulary=vocabulary)
    engine = _build(job, mesh, placed, drawn=job.model.path is None)
    if engine.model.vocabulary < vocabulary:
        raise UsageError(
            f"--data {file.path} has tokens up to {vocabulary - 1}, but {job.model.name} knows 0 to "
            f"{engine.model.vocabulary - 1}; was it encoded by the model's own tokenizer?"
        )
    length = _length(job, engine)
    data = PreparedData.of(file, length, job.data.documents, job.model.seed)
    _check_corpus(job, data)
    return Workload(job, engine, data, data, writes=True, token_file=file)


def _length(job: TrainConfig, engine: LayeredEngine) -> int:
    """Tokens of a sample."""
    length, context = job.data.length or engine.model.context, engine.model.context
    if 0 < context < length:
        raise UsageError(f"--length {length}: the context of {job.model.name} is {context}; give at most that")
    return length


def _open_code(job: TrainConfig, mesh: Mesh, placed: bool) -> Workload:
    """A model or an engine of the user's own; it learns from arrays unless it is a Model of text."""
    from spmd_engine.training.data.array_file import FileData, load_arrays

    make, path = job.model.engine, str(job.data.path or "")
    if make is None and not path.endswith(".npz"):
        return _open_model(job, mesh, placed)
    if not path.endswith(".npz"):
        raise UsageError(f"{job.model.name} is an engine of your own: give --data FILE.npz, with arrays x and y")
    if make is not None:
        _check_undivided(job, f"{job.model.name}, which makes an engine,")
        engine = make_engine(make, mesh, device=job.device, dtype=dtype_of(job.model.dtype))
        check_mesh(job.model.name, engine, mesh, job.composition.mesh)
        check_dtype(job.model.name, engine, dtype_of(job.model.dtype))
    else:
        engine = _build(job, mesh, placed)
    corpus = load_arrays(mesh.group(), path)
    _check_corpus(job, corpus)
    numbers = isinstance(engine, LayeredEngine) and not engine.model.vocabulary  # else whole numbers may be tokens
    return Workload(job, engine, corpus, FileData(corpus, job.model.dtype, numbers, job.model.seed))


def _open_images(job: TrainConfig, mesh: Mesh, placed: bool) -> Workload:
    """The workload of images; its job gets the sizes that the model is built for."""
    from spmd_engine.training.data.contact_sheet import sheet_of
    from spmd_engine.training.data.images import ImageData, load_images  # imports the formats of images

    images = load_images(mesh.group(), job.data.path)
    _check_corpus(job, images)
    job = job.with_options(images=_model_sizes(asdict(images.shape), job))
    engine = _build(job, mesh, placed)
    data = ImageData(images, dtype=job.model.dtype, augment=job.data.augment, seed=job.model.seed)
    return Workload(job, engine, images, data, picture=partial(sheet_of, images))


def _model_sizes(data_sizes: dict[str, int], job: TrainConfig) -> dict[str, int]:
    """The sizes of a model: those of the job, which the images must fit, or else those of the images."""
    model_sizes = job.model.images or data_sizes
    same_shape = all(data_sizes[name] == model_sizes[name] for name in ("height", "width", "channels"))
    if not same_shape or data_sizes["classes"] > model_sizes["classes"]:
        data_shape, model_shape = ImageShape(**data_sizes), ImageShape(**model_sizes)
        raise UsageError(f"{job.data.path or 'the digits'}: {data_shape}, but the model is for {model_shape}")
    return dict(model_sizes)


def _open_page(job: TrainConfig, mesh: Mesh) -> Workload:
    from spmd_engine.strategies.two_convolutions import IMAGE

    name, dtype = job.strategy or "", job.model.dtype
    page: Any = strategy_named(name)
    if job.model.name != PAGE_MODEL:
        raise UsageError(f"--strategy {name} has a small model of its own: leave out --model {job.model.name}")
    _check_undivided(job, f"--strategy {name}")
    if job.model.dropout:
        raise UsageError(f"--strategy {name}: pages of strategies/ have no dropout")
    if any(axis not in mesh.axes for axis in page.axes):
        wanted = ",".join(f"{axis}=N" for axis in page.axes)
        raise UsageError(f"--strategy {name} with --mesh {mesh}: it needs --mesh {wanted}")
    with making_on(get_backend(job.device)):
        engine = page(_WIDTH, _HEADS if "heads" in page.sizes else _HIDDEN, mesh, dtype)
    engine.initialize(job.model.seed)
    corpus = load_corpus(mesh.group(), job.data.path, 1, _columns(job))
    _check_corpus(job, corpus)
    sizes = {"s": _LENGTH, "d": _WIDTH, "h": IMAGE[0], "w": IMAGE[1], "c": _WIDTH}
    shape = tuple(sizes[letter] for letter in page.sample.split()[1:])
    return Workload(job, engine, corpus, BytePairs(corpus, prod(shape), dtype, job.model.seed, shape))


def _check_undivided(job: TrainConfig, what: str) -> None:
    """Raise UsageError for options of a composition, since ``what`` has its own sharding."""
    chosen, usual = job.composition.as_json(), ParallelConfig().as_json()
    if options := [name for name in chosen if chosen[name] != usual[name] and name != "mesh"]:
        listed = ", ".join("--" + name.replace("_", "-") for name in options)
        raise UsageError(f"{what} has a sharding of its own: it does not go with {listed}")


def optimizer_of(training: StepConfig) -> Optimizer:
    """The optimizer that a job names."""
    if training.optimizer == "adamw":
        return AdamW(weight_decay=training.weight_decay)
    return SGD(training.momentum, training.weight_decay)


def step_of(job: TrainConfig) -> dict[str, Any]:
    """The batch, dtype and optimizer of a job's step, as functions that predict the step take them."""
    data, dtype = job.data, dtype_of(job.model.dtype)
    sizes = {"batch_size": data.batch_size, "micro_batches": data.micro_batches, "sequence": data.length}
    return {**sizes, "dtype": dtype, "optimizer": optimizer_of(job.training)}


def rate_of(training: StepConfig) -> WarmupCosine:
    """The learning rate that a job describes."""
    steps = training.decay_steps or training.steps
    warmup = min(WARMUP, steps // 10) if training.warmup is None else training.warmup
    return WarmupCosine(training.learning_rate, max(steps, warmup), warmup)


def make_trainer(workload: Workload) -> Trainer:
    """The trainer that a job describes."""
    job, training = workload.job, workload.job.training

    def batches(step: int) -> Batch:
        size, micro_batches = job.data.batch_size, job.data.micro_batches
        return workload.data.batch(workload.engine, step, size=size, micro_batches=micro_batches)

    rate = rate_of(training)
    limits = {"grad_clip": training.grad_clip, "max_skipped": training.max_skipped}
    return Trainer(workload.engine, optimizer_of(training), batches, rate, **limits)
