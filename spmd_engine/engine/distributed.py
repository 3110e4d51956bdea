"""``as_distributed``: runs a model for one device on all ranks, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.precision import float_dtype, is_float
from spmd_engine.comm import Mesh
from spmd_engine.comm.agreement.rank_zero import on_all_ranks
from spmd_engine.comm.device_transport import open_device
from spmd_engine.engine.base import ShardedEngine, making_on
from spmd_engine.engine.batch import Batch, Scores
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.contract import backward_of, check_batch, check_parameters, lack_of_parameters
from spmd_engine.engine.definition import Loss
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.state.assignment import Assignment, ZeroConfig
from spmd_engine.engine.zero.parameter_store import ParameterStore, StoredEngine
from spmd_engine.engine.zero.reducer import Reducer
from spmd_engine.errors import UsageError, described
from spmd_engine.layers import Layer, Parameter
from spmd_engine.losses import cross_entropy, mean_squared_error
from spmd_engine.models import Model
from spmd_engine.models.user_code import call, name_of
from spmd_engine.sharding import Layout
from spmd_engine.sharding.groups import Member, Sum, make_groups

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
    by default, with the ``options`` of its constructor. For layers, give the letters of inputs and outputs (by default
    "b d" each) and the loss: ``mean_squared_error`` (the default), ``cross_entropy`` of outputs whose last letter is
    the classes, or another loss of whole samples. Targets have the letters of the outputs, without the classes.
    A name, such as "gpt-nano", selects a model of the command line, with the ``options`` of ``ModelConfig`` and
    ``ParallelConfig``. A ShardedEngine for one device keeps whole parameters, so only gradients and optimizer state
    are sharded (``zero=2``; 1: only the optimizer state). Raises UsageError for an engine that is already sharded, and
    for options that do not apply.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise UsageError(f"as_distributed: mesh is {described(mesh)}; make it a Mesh, as Mesh(data=2)")
    if "dtype" in options:
        options["dtype"] = float_dtype("as_distributed", options["dtype"]).name
    layer_options = {"inputs": inputs, "outputs": outputs, "targets": targets, "loss": loss}
    if isinstance(model, (str, Model, ShardedEngine)):
        if inapplicable := [name for name, value in layer_options.items() if value is not None]:
            raise UsageError(f"as_distributed: a {type(model).__name__} has its own {', '.join(inapplicable)}")
        if isinstance(model, ShardedEngine):
            _check_options(options, [])
            return DistributedEngine(model, mesh, zero=2 if zero is None else zero)
        if isinstance(model, str):
            return _build_named_model(model, mesh, {"zero": 3 if zero is None else zero, **options})
    else:
        model = _make_model(model, inputs or "b d", outputs or "b d", targets, loss or mean_squared_error)
    _check_options(options, [name for name in signature(LayeredEngine).parameters if name not in ("model", "mesh")])
    options.setdefault("storage", ZeroConfig(3 if zero is None else zero))
    return LayeredEngine(model, mesh, **options)


def _build_named_model(name: str, mesh: Mesh | None, options: dict[str, Any]) -> LayeredEngine:
    """The engine of a model named as on the command line. Raises UsageError for a path, whose weights are elsewhere."""
    model_fields, parallel_fields = (list(kind().as_json()) for kind in (ModelConfig, ParallelConfig))
    _check_options(options, [name for name in (*model_fields, *parallel_fields) if name not in ("name", "mesh")])
    model = ModelConfig(name, **{key: value for key, value in options.items() if key in model_fields})
    if model.path is not None:
        raise UsageError(f"as_distributed: {name} is a path; train it by spmd_engine.train(TrainConfig.of(model=...))")
    composition = ParallelConfig(**{key: value for key, value in options.items() if key in parallel_fields})
    return build_engine(model, mesh if mesh is not None else Mesh(), composition)


def _check_options(options: Mapping[str, Any], allowed: Sequence[str]) -> None:
    if unknown := [name for name in options if name not in allowed]:
        names = ", ".join(dict.fromkeys(["zero", *allowed]))
        raise UsageError(f"as_distributed has no option {unknown[0]!r} for this model; choose from: {names}")


def _make_model(layers: Layers, inputs: str, outputs: str, targets: str | None, loss: Loss) -> Model:
    if isinstance(layers, type) or not isinstance(layers, Iterable):
        raise UsageError(f"as_distributed: {described(layers)} is no list of layers, no Model, no engine and no name")
    named = tuple(layer if isinstance(layer, tuple) else (f"layer{i}", layer) for i, layer in enumerate(layers))
    if not named or (wrong := [pair for pair in named if not (len(pair) == 2 and isinstance(pair[1], Layer))]):
        problem = f"{wrong[0][-1]!r} is none" if named else "the list is empty"
        raise UsageError(f"as_distributed: give layers, or pairs of a name and a layer; {problem}")
    positions = [layer.sizes["p"] for _, layer in named if "p" in layer.sizes]  # tables that limit the sequence
    targets = targets or (outputs.rpartition(" ")[0] if loss is cross_entropy else outputs)
    return Model("model", named, inputs, outputs, targets, loss, min(positions, default=0))


class DistributedEngine(StoredEngine):
    """An engine for one device, run by every rank on its part of the batch; its state is sharded by groups."""

    def __init__(self, engine: ShardedEngine, mesh: Mesh | None = None, *, zero: int = 2) -> None:
        _check(engine, zero)
        self.mesh = mesh if mesh is not None else Mesh()
        self.engine, self.backend, self.dtype, self.layout = engine, engine.backend, engine.dtype, Layout()
        self.loss, self.metrics = engine.loss, engine.metrics
        #: only the batch is sharded
        self.input_sharding = self.output_sharding = f"b/{','.join(self.mesh.axes)}"
        storage = ZeroConfig(zero)
        over = tuple(axis for axis, size in self.mesh.axes.items() if size > 1)
        summed = Sum(over, storage.sharded_axes(over, self.mesh.axes))
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
        where = self.mesh, self.layout, storage, dtype, self.backend
        self.store = ParameterStore(described, assignment, *where, together=True)
        self._reducer = Reducer(self.storages, uses, [range(1)])
        self._take(arrays)

    def load_checkpoint(self, params: Mapping[str, Any]) -> None:
        self.engine.load_checkpoint(params)
        rounds = any(storage.table.rounds for storage in self.storages)
        self._take(params if rounds else self.engine.parameters)  # masters before they are rounded

    def _take(self, arrays: Mapping[str, Any]) -> None:
        for name, part in self.parameters.items():
            index = self.index(name)
            if index is not None:
                part[...] = self.backend.asarray(arrays[name][index])
        self.store.publish()

    def after_update(self) -> None:
        super().after_update()
        for storage in self.storages:
            for name, array in storage.parameters.items():
                self.engine.parameters[name][...] = array
        self.engine.after_update()

    def forward(self, x: Array) -> Array | None:
        return self.engine.forward(x)

    def backward(self, grads: Array | None) -> dict[str, Array]:
        """Gradients by name, like ``owned``, summed over the batch: of this one micro-batch alone."""
        self._reducer.begin(1)
        self._add(backward_of(self.engine, grads))
        self._reducer.finish()
        return {name: gradient.copy() for name, gradient in self.named(self.store.gradients).items()}

    def _add(self, gradients: Mapping[str, Array]) -> None:
        sums = self._reducer.sums(0)
        for name, gradient in gradients.items():
            sums.add(name, gradient)
        self._reducer.layer_done(0)
        self.input_gradient = self.engine.input_gradient

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        """As ShardedEngine.step; sharded gradients are sent to their owners after each micro-batch."""
        check_batch(batch)
        count, scores = self.count(batch), Scores(loss or self.loss, self.metrics)
        self._reducer.begin(len(batch.micro_batches))
        for m, micro in enumerate(batch.micro_batches):
            with self.engine.micro_batch(m):
                self._add(self.engine._gradients_of(micro, scores, count / self.loss_scale))
        self._reducer.finish()
        self.gradients = self.store.gradients
        return self._take_scores(scores, count)

    def inference(self) -> AbstractContextManager[None]:
        return self.engine.inference()


def _check(engine: ShardedEngine, zero: int) -> None:
    label = f"as_distributed: {type(engine).__name__}"
    if not engine.parameters:
        raise UsageError(f"{label} has no parameters yet: {lack_of_parameters(engine)}")
    check_parameters(engine)
    if "/" in engine.input_sharding or any(engine.sharding(name).axes for name in engine.parameters):
        raise UsageError(f"{label} is already sharded over mesh axes; run it as it is")
    if zero not in (0, 1, 2):
        raise UsageError(f"{label}: zero={zero}, but a user's engine keeps whole parameters; choose 0, 1 or 2")
    dtypes = sorted({str(array.dtype) for array in engine.parameters.values()})
    if len(dtypes) > 1:
        raise UsageError(f"{label} has parameters of several dtypes, {', '.join(dtypes)}; make them all one dtype")


# --- A user's engine, made by a class or a function that may take the mesh


def make_engine(make: Callable[..., Any], mesh: Mesh, *, device: str = "cpu", **offered: Any) -> ShardedEngine:
    """The engine that ``make``, a class or a function, returns, on ``mesh`` unless it has made a mesh itself.

    ``make`` gets those of the arguments ``mesh`` and ``offered`` that it takes by name. Raises UsageError if it needs
    others, returns no ShardedEngine, or one with parameters that are not on the ``device``.
    """
    backend = open_device(mesh, device)
    with making_on(backend, offered.get("dtype")):
        engine = call(make, "the engine", mesh=mesh, **offered)
    if isinstance(engine, Model):
        engine = LayeredEngine(engine, mesh, dtype=offered.get("dtype"), backend=backend)
    if not isinstance(engine, ShardedEngine):
        raise UsageError(
            f"{name_of(make)} returned a {type(engine).__name__}; it must return a ShardedEngine or a Model"
        )
    if "_mesh" not in engine.__dict__:
        engine.mesh = mesh
    elsewhere = [name for name, array in engine.parameters.items() if not backend.owns(array)]
    if backend.on_device and elsewhere:
        raise UsageError(
            f"{name_of(make)}: {elsewhere[0]} is not on device {device!r}; make parameters by self.xp or self.block, "
            "and compute by self.xp instead of numpy"
        )
    return engine


def check_dtype(name: str, engine: ShardedEngine, dtype: Any) -> None:
    """Raise UsageError, on all ranks, if parameters of the engine ``name`` have floats of another dtype than a job."""

    def check() -> None:
        for parameter, array in engine.parameters.items() if not isinstance(engine, StoredEngine) else ():
            if is_float(array.dtype) and array.dtype != dtype:
                raise UsageError(
                    f"{name}: {parameter} is {array.dtype}, not {np.dtype(dtype)}: make parameters by self.block, or "
                    "take the dtype, def __init__(self, dtype)"
                )

    on_all_ranks(engine.group(), check)


def check_mesh(name: str, engine: ShardedEngine, mesh: Mesh, axes: Mapping[str, int] | None) -> None:
    """Raise UsageError if ``--mesh`` gave ``axes``, and the engine has made another mesh."""
    if axes and str(engine.mesh) != str(mesh):
        raise UsageError(
            f"{name} makes a mesh of its own, {engine.mesh}, instead of --mesh {mesh}: let it take the mesh, "
            "def __init__(self, mesh), or omit --mesh"
        )
