"""Makes the engine to verify, and its reference: the same engine on a mesh of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import key_of, normal
from spmd_engine.checkpoints import open_pretrained
from spmd_engine.comm import Mesh
from spmd_engine.comm.agreement.rank_zero import on_rank_zero
from spmd_engine.comm.communicators.threads import run_threads, solo
from spmd_engine.comm.notation import Spec
from spmd_engine.engine import Batch, LayeredEngine, ModelConfig, ParallelConfig, ShardedEngine, batch_of, build_engine
from spmd_engine.engine.contract import lack_of_parameters
from spmd_engine.engine.distributed import make_engine
from spmd_engine.errors import UsageError, WrongNumberOfRanks
from spmd_engine.losses import mean_squared_error
from spmd_engine.models import Model
from spmd_engine.models.user_code import name_of
from spmd_engine.verification.comparison import from_first

DEVIATION = 0.1  #: standard deviation of the values that replace zeros


def mesh_of_one(axes: Iterable[str] = ("data",)) -> Mesh:
    """Return a mesh of this rank alone, on which each of the axes has size 1."""
    sizes: dict[str, Any] = dict.fromkeys(axes, 1)
    return Mesh(solo(), **sizes)


def engine_and_reference(make: Callable[..., Any], mesh: Mesh) -> tuple[ShardedEngine, ShardedEngine | None]:
    """Make a user's engine on all ranks and, on rank 0, the same engine on one rank, with the same parameters.

    ``make``, a class or a function, is called with ``mesh`` and with ``dtype=float64`` if it has parameters of these
    names, and with nothing else. An engine without a mesh gets this one; the reference's mesh has the same axes. The
    comparison does not find mistakes that the engine also makes on one rank. Collective. Raises UsageError if ``make``
    has other required parameters, or returns no ShardedEngine.
    """
    engine = _make_checked(make, mesh)

    def make_reference() -> ShardedEngine:
        single_mesh = mesh_of_one(engine.mesh.axes)
        return run_threads(_make_checked, 1, args=(make, single_mesh))[0]  # a mesh made by `make` has one rank, too

    reference = on_rank_zero(engine.group(), make_reference)
    parameters = {name: engine.gather(name, root=0) for name in engine.names}
    if reference is not None:
        _load(reference, parameters)
    return engine, reference


def fill_zeros(engine: ShardedEngine, reference: ShardedEngine | None, seed: int) -> None:
    """Replace parameters that are all 0, which would hide mistakes, by random values in both engines. Collective.

    Both load all parameters in float64: an engine that keeps the arrays of its checkpoint then computes in float64.
    """
    world, parameters = engine.group(), {}
    for name in engine.names:
        values = None
        if reference is not None:
            gathered = reference.gather(name)
            values = backend_of(gathered).to_host(gathered).astype(np.float64)
            if not values.any():
                values = DEVIATION * normal(key_of(seed, "verify", name), values.shape, np.float64)
        parameters[name] = world.broadcast(values, label="verify")
    _load(engine, parameters)
    if reference is not None:
        _load(reference, parameters)


@contextmanager
def put_back(engine: ShardedEngine) -> Iterator[None]:
    """Restore the engine's attributes and the states of its random generators on exit."""
    generators = np.random.Generator, np.random.RandomState
    before = {name: deepcopy(x) if isinstance(x, generators) else x for name, x in vars(engine).items()}
    try:
        yield
    finally:
        vars(engine).clear()
        vars(engine).update(before)


def _load(engine: ShardedEngine, parameters: dict[str, Array]) -> None:
    engine.load_checkpoint({name: array.copy() for name, array in parameters.items()})  # it may keep the arrays
    engine.after_update()


def _make_checked(make: Callable[..., Any], mesh: Mesh) -> ShardedEngine:
    try:
        engine = make_engine(make, mesh, dtype=np.float64)
    except WrongNumberOfRanks as error:  # `make` makes a mesh of another size
        ranks = "one rank, with which verify compares" if mesh.size == 1 else f"{mesh.size} ranks"
        raise UsageError(
            f"on {ranks}, {name_of(make)} cannot be made: it makes the mesh {error.mesh}, of {error.ranks} ranks. "
            "Let it take the mesh: def __init__(self, mesh). Then start: "
            f"mpiexec -n {error.ranks} python -m spmd_engine verify ... --mesh {error.mesh}"
        ) from error
    if not engine.names:
        raise UsageError(
            f"{name_of(make)} made an engine without parameters: {lack_of_parameters(engine)}; or name a function that "
            "makes the engine and loads them"
        )
    return engine


# --- Random batches for verification: functions of seed, step and global index, independent of the mesh


Batches = Callable[[ShardedEngine, int], Batch]


def batches_for_model(model: Model, size: int, *, length: int = 32, micro_batches: int = 1, seed: int = 0) -> Batches:
    """Return batches of ``size`` samples for a model; sequences have ``length`` positions (at most its context).

    Tokens and classes are uniformly distributed, vectors normally.
    """
    common = {"b": size, "s": min(length, model.context)}
    first = {**model.layers[0][1].sizes, **common}
    last: dict[str, int] = {}  # sizes by letter, in the last layer that has the letter
    for _, layer in model.layers:
        last |= layer.sizes
    last |= common
    inputs = [size, *model.sample] if model.sample else [first[letter] for letter in model.inputs.split()]
    targets = [last[letter] for letter in model.targets.split()]
    classes = last[model.outputs.split()[-1]] if model.targets != model.outputs else 0  # 0: targets are numbers

    def batch(engine: ShardedEngine, step: int) -> Batch:
        generator = _generator(seed, step)
        x = generator.integers(0, model.vocabulary, inputs) if model.vocabulary else generator.standard_normal(inputs)
        y = generator.integers(0, classes, targets) if classes else generator.standard_normal(targets)
        return batch_of(x, y, engine, micro_batches, step)

    return batch


def _generator(seed: int, *numbers: int) -> np.random.Generator:
    """A generator for these numbers; seeds below 0 are as valid as in training."""
    return np.random.default_rng([seed % (1 << 64), *numbers])


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
    """Return batches for a user's engine: normal inputs of this shape, batch first, and targets like its outputs.

    With ``below``, inputs are integers in [0, below) (tokens) instead. With ``classes``, targets are integers in
    [0, classes) of the shape of the outputs without their last dim. Collective: rank 0 computes the shape of the
    outputs with the reference. Raises UsageError if outputs or targets of the engine do not have such shapes.
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
        generator = _generator(seed, step)
        return generator.standard_normal(shape).astype(dtype) if below is None else generator.integers(0, below, shape)

    target_shape, dtype = from_first(engine.group(), on_rank_zero(engine.group(), find_shape))

    def batch(engine: ShardedEngine, step: int) -> Batch:
        generator = _generator(seed, step, 1)
        if classes:
            targets = generator.integers(0, classes, target_shape)
        else:
            targets = generator.standard_normal(target_shape).astype(dtype)
        return batch_of(inputs(step, dtype), targets, engine, micro_batches, step)

    return batch


def _check_targets(engine: ShardedEngine, classes: int | None) -> None:
    """Raise UsageError if the engine needs other targets than those that can be drawn."""
    targets, outputs = Spec.parse(engine.target_sharding), Spec.parse(engine.output_sharding)
    if not classes and targets != outputs:
        raise UsageError(
            f'targets are "{targets}", outputs "{outputs}". Targets unlike the outputs can only be classes: '
            "--classes N. For others, call spmd_engine.verification.verify with your own batches and loss"
        )
    expected = Spec(outputs.dims[:-1]) if len(outputs.dims) > 1 else outputs  # "b/data" means that and further dims
    if classes and targets != expected:
        raise UsageError(
            f'--classes {classes}: targets must be like outputs, "{outputs}", without their last dim: set in the '
            f'engine target_sharding = "{expected}"'
        )
    if classes and engine.loss is mean_squared_error:
        raise UsageError(
            f"--classes {classes}: the engine's loss is the mean squared error, not one of classes. Set in the engine, "
            "for example, loss = staticmethod(cross_entropy), from spmd_engine.layers"
        )


# --- The engine of a model by name, with parameters that do not hide mistakes


def engine_of_model(
    model: ModelConfig, mesh: Mesh, composition: ParallelConfig, *, device: str = "cpu"
) -> LayeredEngine:
    """Return a model on a mesh, with random parameters. Collective.

    The frozen weights of a model with adapters are read if the model is given by a path, and random otherwise. Adapters
    that are initialized to zeros get random values, since zeros would leave the other adapters without gradients.
    """
    if model.lora is None or model.path is None:
        engine = build_engine(model, mesh, composition, device=device)
    else:
        engine, _ = open_pretrained(model, mesh, composition, device=device)
    if model.lora is None:
        return engine
    for name, target in engine.parameters.items():
        parameter, shape = engine.store.described[name]
        if parameter.mean == parameter.std == 0 and target.size:
            key = key_of(engine.seed, "verify", name)
            target += DEVIATION * normal(key, shape, engine.dtype, engine.index(name), engine.backend)
    engine.filled()
    return engine
