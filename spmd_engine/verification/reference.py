"""The engine to verify and the single device to compare it with: a mesh of one rank, and the same engine on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import key_of, normal
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.comm.agreement.rank_zero import on_rank_zero
from spmd_engine.comm.communicators.threads import run_threads, solo
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, batch_of
from spmd_engine.engine.distributed import make_engine
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.parallel_config import ModelConfig, ParallelConfig, build_engine
from spmd_engine.errors import UsageError, WrongNumberOfRanks
from spmd_engine.losses import mean_squared_error
from spmd_engine.models import Model
from spmd_engine.models.user_code import name_of
from spmd_engine.sharding.notation import Spec
from spmd_engine.verification.comparison import from_first

DEVIATION = 0.1  #: of the values that take the place of zeros


def mesh_of_one(axes: Iterable[str] = ("data",)) -> Mesh:
    """A mesh of this rank alone, on which each of the axes has size 1."""
    sizes: dict[str, Any] = dict.fromkeys(axes, 1)
    return Mesh(solo(), **sizes)


def engine_and_reference(make: Callable[..., Any], mesh: Mesh) -> tuple[ShardedEngine, ShardedEngine | None]:
    """An engine of one's own on all ranks and, on rank 0, the same on one rank, with the first one's parameters.

    ``make``, a class or a function, is called with ``mesh`` and with ``dtype=float64`` if it takes arguments of these
    names, and with nothing else. An engine without a mesh of its own gets this one; the reference's has the same
    axes. What is wrong on one rank, too, is not found by comparing with it. Collective. Raises UsageError if ``make``
    wants more, or makes no ShardedEngine.
    """
    engine = _made(make, mesh)

    def alone() -> ShardedEngine:
        one = mesh_of_one(engine.mesh.axes)
        return run_threads(_made, 1, args=(make, one))[0]  # a mesh that it makes itself is then one of one rank, too

    reference = on_rank_zero(engine.group(), alone)
    whole = {name: engine.gather(name, root=0) for name in engine.names}
    if reference is not None:
        _load(reference, whole)
    return engine, reference


def fill_zeros(engine: ShardedEngine, reference: ShardedEngine | None, seed: int) -> None:
    """Give both random values in place of parameters that are all 0, which would hide mistakes. Collective.

    Both load all parameters, as float64: an engine that keeps those of its checkpoint then computes in it.
    """
    world, whole = engine.group(), {}
    for name in engine.names:
        values = None
        if reference is not None:
            gathered = reference.gather(name)
            values = backend_of(gathered).to_host(gathered).astype(np.float64)
            if not values.any():
                values = DEVIATION * normal(key_of(seed, "verify", name), values.shape, np.float64)
        whole[name] = world.broadcast(values, label="verify")
    _load(engine, whole)
    if reference is not None:
        _load(reference, whole)


@contextmanager
def put_back(engine: ShardedEngine) -> Iterator[None]:
    """Afterwards the engine's attributes are those that it had, and its random generators where they were."""
    generators = np.random.Generator, np.random.RandomState
    before = {name: deepcopy(x) if isinstance(x, generators) else x for name, x in vars(engine).items()}
    try:
        yield
    finally:
        vars(engine).clear()
        vars(engine).update(before)


def _load(engine: ShardedEngine, whole: dict[str, Array]) -> None:
    engine.load_checkpoint({name: array.copy() for name, array in whole.items()})  # it may keep what it is given
    engine.after_update()


def _made(make: Callable[..., Any], mesh: Mesh) -> ShardedEngine:
    try:
        made = make_engine(make, mesh, dtype=np.float64)
    except WrongNumberOfRanks as error:  # of a mesh that it makes itself
        ranks = "one rank, with which verify compares" if mesh.size == 1 else f"{mesh.size} ranks"
        raise UsageError(
            f"on {ranks}, {name_of(make)} cannot be made: it makes the mesh {error.mesh}, of {error.ranks} ranks. "
            "Let it take the mesh: def __init__(self, mesh). Then start: "
            f"mpiexec -n {error.ranks} python -m spmd_engine verify ... --mesh {error.mesh}"
        ) from error
    if not made.names:
        raise UsageError(
            f"{name_of(make)} made an engine without parameters: load some in its constructor, or name a function that "
            "makes it and loads them"
        )
    return made


# --- Random batches to verify with: functions of seed, step and global index alone, whatever the mesh


Batches = Callable[[ShardedEngine, int], Batch]


def batches_for_model(
    model: Model, size: int, *, length: int = 32, micro_batches: int = 1, seed: int = 0, dtype: Any = np.float64
) -> Batches:
    """Batches of ``size`` samples as the model wants them; of sequences, ``length`` positions (at most its context).

    Tokens and classes are drawn evenly, vectors from a normal distribution.
    """
    common = {"b": size, "s": min(length, model.context)}
    first = {**model.layers[0][1].sizes, **common}
    last: dict[str, int] = {}  # of each letter, in the last layer that has it
    for _, layer in model.layers:
        last |= layer.sizes
    last |= common
    inputs = [size, *model.sample] if model.sample else [first[letter] for letter in model.inputs.split()]
    targets = [last[letter] for letter in model.targets.split()]
    classes = last[model.outputs.split()[-1]] if model.targets != model.outputs else 0  # one of so many, or numbers

    def batch(engine: ShardedEngine, step: int) -> Batch:
        draw = np.random.default_rng([seed, step])
        x = draw.integers(0, model.vocabulary, inputs) if model.vocabulary else draw.standard_normal(inputs)
        y = draw.integers(0, classes, targets) if classes else draw.standard_normal(targets)
        x, y = (array.astype(dtype) if array.dtype.kind == "f" else array for array in (x, y))
        return batch_of(x, y, engine, micro_batches, step)

    return batch


def batches_of_shape(
    engine: ShardedEngine,
    reference: ShardedEngine | None,
    shape: Sequence[int],
    *,
    micro_batches: int = 1,
    seed: int = 0,
    below: int | None = None,
    classes: int | None = None,
) -> Batches:
    """Batches for an engine of one's own: normal inputs of this shape, the batch first, and targets like its outputs.

    With ``below``, inputs are whole numbers from 0 up to it (tokens) instead. With ``classes``, targets are whole
    numbers below that, shaped like the outputs without their last dim. Collective: rank 0 asks the reference for its
    outputs' shape. Raises UsageError if the engine's targets are of another shape.
    """
    _check_targets(engine, classes)

    def find_shape() -> tuple[tuple[int, ...], str]:
        assert reference is not None, "rank 0 has one"
        dtype = np.result_type(*(parameter.dtype for parameter in reference.parameters.values()))
        with put_back(reference), reference.inference():
            outputs: Array = reference.forward(reference.backend.asarray(inputs(0, dtype)))
        if not outputs.ndim or len(outputs) != shape[0]:
            raise UsageError(
                f"inputs of shape {tuple(shape)} give outputs of {outputs.shape}; both must begin with the batch"
            )
        if classes and (outputs.ndim < 2 or outputs.shape[-1] < classes):
            raise UsageError(
                f"{classes} classes, but outputs of shape {outputs.shape}: their last dim must have a score for each"
            )
        return outputs.shape[:-1] if classes else outputs.shape, dtype.name

    def inputs(step: int, dtype: Any) -> np.ndarray:
        draw = np.random.default_rng([seed, step])
        return draw.standard_normal(shape).astype(dtype) if below is None else draw.integers(0, below, shape)

    target_shape, dtype = from_first(engine.group(), on_rank_zero(engine.group(), find_shape))

    def batch(engine: ShardedEngine, step: int) -> Batch:
        draw = np.random.default_rng([seed, step, 1])
        if classes:
            targets = draw.integers(0, classes, target_shape)
        else:
            targets = draw.standard_normal(target_shape).astype(dtype)
        return batch_of(inputs(step, dtype), targets, engine, micro_batches, step)

    return batch


def _check_targets(engine: ShardedEngine, classes: int | None) -> None:
    """Raise UsageError if what can be made up is not what the engine wants."""
    targets, outputs = Spec.parse(engine.target_sharding), Spec.parse(engine.output_sharding)
    if not classes and targets != outputs:
        raise UsageError(
            f'targets are "{targets}", outputs "{outputs}". Of targets unlike the outputs, only classes can be made '
            "up: --classes N. For others, bring batches, and a loss, of your own to spmd_engine.verification.verify"
        )
    wanted = Spec(outputs.dims[:-1]) if len(outputs.dims) > 1 else outputs  # "b/data" is the batch, and what follows
    if classes and targets != wanted:
        raise UsageError(
            f'--classes {classes}: targets are then like outputs, "{outputs}", without their last dim: say in the '
            f'engine target_sharding = "{wanted}"'
        )
    if classes and engine.loss is mean_squared_error:
        raise UsageError(
            f"--classes {classes}: the engine's loss is the mean squared error, of no classes. Say in the engine, for "
            "instance, loss = staticmethod(cross_entropy), from spmd_engine.layers"
        )


# --- The engine of a model by name, with values in which mistakes show


def engine_of_model(
    model: ModelConfig, mesh: Mesh, composition: ParallelConfig, *, device: str = "cpu"
) -> LayeredEngine:
    """A model on a mesh, with random parameters. Collective.

    What adapters leave frozen is read, if the model is one by path, and else random; they themselves are not the zeros
    with which half of them begin, behind which the others would have no gradients.
    """
    if model.lora is None or model.path is None:
        engine = build_engine(model, mesh, composition, device=device)
    else:
        engine, _ = open_pretrained(model, mesh, composition, device=device)
    if model.lora is not None:
        _draw_zeros(engine)
    return engine


def _draw_zeros(engine: LayeredEngine) -> None:
    """Give it random values in place of parameters that begin as zeros."""
    for name, target in engine.parameters.items():
        parameter, shape = engine.store.described[name]
        if parameter.mean == parameter.std == 0 and target.size:
            key = key_of(engine.seed, "verify", name)
            target += DEVIATION * normal(key, shape, engine.dtype, engine.index(name), engine.backend)
    engine.filled()
