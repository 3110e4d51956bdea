"""``as_distributed``: a model for one device, spread over all ranks in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from inspect import signature
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.base import Loss, ShardedEngine
from spmd_engine.engine.batch import Batch, Scores
from spmd_engine.engine.contract import backward_of, check_batch, check_parameters, check_tape
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.parallel_config import ModelConfig, ParallelConfig, build_engine
from spmd_engine.engine.state.assignment import Assignment, ZeroConfig
from spmd_engine.engine.zero.parameter_store import ParameterStore, StoredEngine
from spmd_engine.engine.zero.reducer import Reducer
from spmd_engine.errors import UsageError
from spmd_engine.layers.contract import described
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.layer import Layer
from spmd_engine.losses import cross_entropy, mean_squared_error
from spmd_engine.models.mlp import class_loss
from spmd_engine.models.model import Model
from spmd_engine.models.user_code import call, name_of
from spmd_engine.sharding.groups import Member, Sum, make_groups
from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.shards import Shards

Layers = Sequence[Layer | tuple[str, Layer]]


def as_distributed(
    model: str | Model | Layers | ShardedEngine,
    mesh: Mesh | None = None,
    *,
    zero: int | None = None,
    inputs: str | None = None,
    outputs: str | None = None,
    targets: str | None = None,
    loss: Loss | None = None,
    **options: Any,
) -> ShardedEngine:
    """An engine that trains ``model`` on all ranks, each with a part of the batch and of the model.

    A ``Model`` or a list of layers (with names or without) becomes a ``LayeredEngine``, fully sharded (``zero=3``)
    by default; ``options`` are its. For layers, give the letters of inputs and outputs ("b d" each,
    by default) and the loss: ``mean_squared_error`` (the default), ``cross_entropy`` of outputs whose last letter is
    the classes, or any other of whole samples. Targets have the letters of the outputs, without the classes.
    A name, such as "gpt-nano", is that of a model as the command line knows it, and ``options`` are then its: those of
    ``ModelConfig`` and ``ParallelConfig``.
    A ShardedEngine written for one device keeps its own arrays, so gradients and optimizer state are what is stored
    in parts (``zero=2``; 1: the optimizer's state alone). Raises UsageError for one that is sharded already.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise UsageError(f"as_distributed: mesh is {described(mesh)}; make it a Mesh, as Mesh(data=2)")
    if "dtype" in options:
        options["dtype"] = _dtype(options["dtype"])
    of_layers = {"inputs": inputs, "outputs": outputs, "targets": targets, "loss": loss}
    if isinstance(model, (str, Model, ShardedEngine)):
        if given := [name for name, value in of_layers.items() if value is not None]:
            raise UsageError(f"as_distributed: a {type(model).__name__} has its own {', '.join(given)}")
        if isinstance(model, ShardedEngine):
            _check_options(options, [])
            return DistributedEngine(model, mesh, zero=2 if zero is None else zero)
        if isinstance(model, str):
            return _by_name(model, mesh, {"zero": 3 if zero is None else zero, **options})
    else:
        model = _model_of(model, inputs or "b d", outputs or "b d", targets, loss or mean_squared_error)
    _check_options(options, [name for name in signature(LayeredEngine).parameters if name not in ("model", "mesh")])
    options.setdefault("storage", ZeroConfig(3 if zero is None else zero))
    return LayeredEngine(model, mesh, **options)


def _dtype(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError as error:
        raise UsageError(f"as_distributed: dtype is {dtype!r}; choose float32 or float64") from error


def _by_name(name: str, mesh: Mesh | None, options: dict[str, Any]) -> LayeredEngine:
    """The model of this name, as the command line has it; raises UsageError for a path, whose weights are elsewhere."""
    of_model, of_composition = ([each.name for each in fields(kind)] for kind in (ModelConfig, ParallelConfig))
    _check_options(options, [each for each in (*of_model, *of_composition) if each not in ("name", "mesh")])
    model = ModelConfig(name, **{each: value for each, value in options.items() if each in of_model})
    if model.path is not None:
        raise UsageError(
            f"as_distributed: {name} is a path; train that by spmd_engine.train(TrainConfig.of(model=...))"
        )
    composition = ParallelConfig(**{each: value for each, value in options.items() if each in of_composition})
    return build_engine(model, mesh if mesh is not None else Mesh(), composition)


def _check_options(options: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := [name for name in options if name not in known]:
        there_are = ", ".join(dict.fromkeys(["zero", *known]))
        raise UsageError(f"as_distributed has no option {unknown[0]!r} for this; there are: {there_are}")


def _model_of(layers: Layers, inputs: str, outputs: str, targets: str | None, loss: Loss) -> Model:
    if isinstance(layers, type) or not isinstance(layers, Iterable):
        raise UsageError(f"as_distributed: {described(layers)} is no list of layers, no Model, no engine and no name")
    named = tuple(each if isinstance(each, tuple) else (f"layer{i}", each) for i, each in enumerate(layers))
    if not named or (wrong := [each for each in named if not (len(each) == 2 and isinstance(each[1], Layer))]):
        found = f"{wrong[0][-1]!r} is none" if named else "the list is empty"
        raise UsageError(f"as_distributed: give layers, or pairs of a name and a layer; {found}")
    tables = [layer.sizes["p"] for _, layer in named if "p" in layer.sizes]  # of positions: they end somewhere
    if loss is cross_entropy:
        *others, classes = outputs.split()
        sizes = [layer.sizes[classes] for _, layer in named if classes in layer.sizes]
        if not sizes:
            raise UsageError(f"as_distributed: outputs {outputs!r} end with the classes, but no layer has {classes!r}")
        targets, known = targets or " ".join(others), class_loss(classes, sizes[-1])
    else:
        targets, known = targets or outputs, _of_whole_samples(loss, outputs)
    return Model("model", named, inputs, outputs, targets, known, min(tables, default=0))


def _of_whole_samples(loss: Loss, outputs: str) -> Callable[..., tuple[float, Array]]:
    """A loss for outputs that are not sharded; the mean squared error takes sharded ones, too."""

    def of_blocks(sh: Shards, y: Array, targets: Array, **options: Any) -> tuple[float, Array]:
        axes = sh.axes(letter for letter in outputs.split() if letter not in "bs")
        if axes and loss is not mean_squared_error:
            raise UsageError(
                f"as_distributed: the outputs {outputs!r} are sharded over {', '.join(axes)}, which this loss "
                "does not support; use cross_entropy, or a Model whose loss supports it"
            )
        return loss(y, targets, **options)

    return of_blocks


class DistributedEngine(StoredEngine):
    """An engine for one device on every rank, each with its part of the batch; its state in parts, by groups."""

    def __init__(self, engine: ShardedEngine, mesh: Mesh | None = None, *, zero: int = 2) -> None:
        _check(engine, zero)
        self.mesh = mesh if mesh is not None else Mesh()
        self.engine, self.backend, self.layout = engine, engine.backend, Layout()
        self.loss, self.metrics = engine.loss, engine.metrics
        #: whatever comes after the batch is whole
        self.input_sharding = self.output_sharding = f"b/{','.join(self.mesh.axes)}"
        storage = ZeroConfig(zero)
        over = tuple(axis for axis, size in self.mesh.axes.items() if size > 1)
        summed = Sum(over, storage.cut(over, self.mesh.axes))
        arrays = engine.parameters
        described = {
            name: (Parameter(" ".join("ijklmnop"[: array.ndim]), decay=engine.decays(name)), array.shape)
            for name, array in arrays.items()
        }
        members = [Member(name, x.shape, described[name][0].decay, summed, x.size) for name, x in arrays.items()]
        dtype = next(iter(arrays.values())).dtype
        uses = {0: {name: name for name in arrays}}
        groups = make_groups(members, dtype.itemsize)
        assignment = Assignment([range(1)], [0], uses, dict.fromkeys(arrays, (0,)), groups)
        self.store = ParameterStore(described, assignment, self.mesh, self.layout, storage, dtype, self.backend)
        self._reducer = Reducer(self.storages, uses, [range(1)])
        self._take_over()

    def load_checkpoint(self, params: Mapping[str, Any]) -> None:
        self.engine.load_checkpoint(params)
        self._take_over()

    def _take_over(self) -> None:
        for name, array in self.engine.parameters.items():
            self.parameters[name][...] = array

    def after_update(self) -> None:
        super().after_update()
        for name, array in self.engine.parameters.items():
            array[...] = self.parameters[name]
        self.engine.after_update()

    def forward(self, x: Array) -> Array | None:
        return self.engine.forward(x)

    def backward(self, grads: Array | None) -> dict[str, Array]:
        """Gradients by name, like ``owned``, summed over the batch: of this one micro-batch alone."""
        self._reducer.begin(1)
        self._backward(grads)
        self._reducer.finish()
        return {name: gradient.copy() for name, gradient in self.named(self.store.gradients).items()}

    def _backward(self, grads: Array | None) -> None:
        sums = self._reducer.sums(0)
        for name, gradient in backward_of(self.engine, grads).items():
            sums.add(name, gradient)
        self._reducer.layer_done(0)
        self.input_gradient = self.engine.input_gradient

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        """As ShardedEngine.step; what is stored in parts goes to its owners after each micro-batch."""
        check_batch(batch)
        count, scores = self.count(batch), Scores(loss or self.loss, self.metrics)
        self._reducer.begin(len(batch.micro_batches))
        for m, micro in enumerate(batch.micro_batches):
            with self.engine.micro_batch(m):
                on_tape = len(self.engine.tape)
                outputs = self.engine.forward(micro.inputs)
                self._backward(None if outputs is None else scores.add(outputs, micro, count))
                check_tape(self.engine, on_tape)
        self._reducer.finish()
        self.gradients = self.store.gradients
        return self._take_scores(scores, count)

    def inference(self) -> AbstractContextManager[None]:
        return self.engine.inference()


def _check(engine: ShardedEngine, zero: int) -> None:
    what = f"as_distributed: {type(engine).__name__}"
    if not engine.parameters:
        raise UsageError(f"{what} has no parameters yet; load a checkpoint into it first")
    check_parameters(engine)
    if "/" in engine.input_sharding or any(engine.sharding(name).axes for name in engine.parameters):
        raise UsageError(f"{what} is already sharded over mesh axes; run it as it is")
    if zero not in (0, 1, 2):
        raise UsageError(f"{what}: zero={zero}, but an engine of its own keeps whole parameters; choose 0, 1 or 2")
    dtypes = sorted({str(array.dtype) for array in engine.parameters.values()})
    if len(dtypes) > 1:
        raise UsageError(f"{what} has parameters of several dtypes, {', '.join(dtypes)}; they share flat arrays")


# --- An engine of a user's own, made by a class or a function that may take the mesh


def make_engine(make: Callable[..., Any], mesh: Mesh, **offered: Any) -> ShardedEngine:
    """What ``make``, a class or a function, makes, on ``mesh`` unless it has made a mesh of its own.

    It is called with ``mesh`` and with what else is ``offered`` if it takes arguments of these names, and with
    nothing else. Raises UsageError if it needs more, or makes no ShardedEngine.
    """
    made = call(make, "the engine", mesh=mesh, **offered)
    if isinstance(made, Model):
        made = LayeredEngine(made, mesh, dtype=offered.get("dtype", np.float32))
    if not isinstance(made, ShardedEngine):
        raise UsageError(f"{name_of(make)} made a {type(made).__name__}; it must make a ShardedEngine or a Model")
    if "_mesh" not in made.__dict__:
        made.mesh = mesh
    return made


def check_mesh(name: str, engine: ShardedEngine, mesh: Mesh, axes: Mapping[str, int] | None) -> None:
    """Raise UsageError if ``--mesh`` gave ``axes``, and the engine has made another mesh."""
    if axes and str(engine.mesh) != str(mesh):
        raise UsageError(
            f"{name} makes a mesh of its own, {engine.mesh}, instead of --mesh {mesh}: let it take the mesh, "
            "def __init__(self, mesh), or omit --mesh"
        )
