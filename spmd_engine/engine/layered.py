"""LayeredEngine: layers x mesh x layout x schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays import random
from spmd_engine.arrays.backend import CPU, Array, Backend
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine import schedules
from spmd_engine.engine.base import Loss, ShardedEngine
from spmd_engine.engine.batch import Batch
from spmd_engine.engine.reducer import Reducer
from spmd_engine.errors import UsageError
from spmd_engine.layers.gradients import GradientSums
from spmd_engine.layers.layer import At, Layer, Parameter
from spmd_engine.models.model import Model
from spmd_engine.sharding.groups import THRESHOLD, Member, ParameterGroup, make_groups
from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.notation import Spec
from spmd_engine.sharding.shards import Shards


class LayeredEngine(ShardedEngine):
    """A model, a list of layers, run on a mesh as the layout says.

    The layers' text is that of one device; the layout decides which letters are cut and so which collectives
    do something. Gradients of all micro-batches are added into flat buffers, and reduced once.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh | None = None,
        layout: Layout | None = None,
        *,
        seed: int = 0,
        dtype: Any = np.float32,
        backend: Backend = CPU,
        schedule: Callable = schedules.sequential,
        group_threshold: int = THRESHOLD,
    ) -> None:
        self.model, self.seed, self.dtype, self.backend = model, seed, np.dtype(dtype), backend
        self.mesh = mesh if mesh is not None else Mesh()
        self.layout = layout if layout is not None else Layout.for_mesh(self.mesh)
        self.schedule = schedule
        for name, layer in model.layers:
            self.layout.check(name, {"b", "s", *layer.sizes}, layer.may_cut, layer.across)
        self._shards = {name: Shards(self.mesh, self.layout, name) for name, _ in model.layers}
        self._described = dict(model.parameters())
        self.groups = self._make_groups(group_threshold)
        self.parameters = self._views(lambda group: group.parameters)
        self._gradients = self._views(lambda group: group.gradients)
        uses = [self._parameters_of(name, layer) for name, layer in model.layers]
        self._weights = [_tree(names, self.parameters) for names in uses]
        self._untouched: set[str] = set()
        self._sums = [
            GradientSums({own: self._gradients[full] for own, full in names.items()}, names, self._untouched)
            for names in uses
        ]
        self._uses = [list(names.values()) for names in uses]
        self._reducer = Reducer(self.mesh, self.groups, self._uses)
        self._counted = [run for group in self.groups for run in group.runs(group.gradients, self.counts_here)]
        self.initialize()

    # --- parameters --------------------------------------------------------------------------------------

    def _make_groups(self, threshold: int) -> list[ParameterGroup]:
        shards = Shards(self.mesh, self.layout)
        members = []
        for name, (parameter, shape) in self._described.items():
            spec = self._spec(parameter)
            summed = shards.axes(parameter.summed, parameter.where)
            largest = prod(spec.largest_shape(shape, self.mesh))
            members.append(Member(name, spec.local_shape(shape, self.mesh), parameter.decay, summed, largest))
        return make_groups(members, self.dtype, self.backend, threshold)

    def _spec(self, parameter: Parameter) -> Spec:
        return self.layout.spec(parameter.dims)

    @staticmethod
    def _parameters_of(layer_name: str, layer: Layer) -> dict[str, str]:
        """A layer's own names of its parameters to their full names."""
        return {name: layer.tied.get(name, f"{layer_name}/{name}") for name in layer.parameters}

    def initialize(self) -> None:
        """Fill the parameters with initial values: functions of seed, name and global index alone."""
        for name, (parameter, shape) in self._described.items():
            target = self.parameters[name]
            target[...] = parameter.mean
            if parameter.std and target.size:
                block = self._spec(parameter).block(shape, self.mesh)
                key = random.key_of(self.seed, "initial", name)
                target += parameter.std * random.normal(key, shape, self.dtype, block, self.backend)

    def load_checkpoint(self, params: Mapping[str, Any]) -> None:
        for name, (_, shape) in self._described.items():
            if name not in params:
                raise UsageError(f"the checkpoint has no {name!r}; it has: {', '.join(sorted(params))}")
            if tuple(params[name].shape) != shape:
                raise UsageError(f"{name}: the checkpoint has shape {tuple(params[name].shape)}, the model {shape}")
            self.parameters[name][...] = self.block(name, params[name])

    @property
    def shardings(self) -> dict[str, str]:
        return {name: str(self._spec(parameter)) for name, (parameter, _) in self._described.items()}

    def sharding(self, name: str) -> Spec:
        return self._spec(self._described[name][0])

    def global_shape(self, name: str) -> tuple[int, ...]:
        return self._described[name][1]

    @property
    def input_sharding(self) -> str:
        return str(self.layout.spec(self.model.inputs))

    @property
    def output_sharding(self) -> str:
        return str(self.layout.spec(self.model.outputs))

    @property
    def target_sharding(self) -> str:
        return str(self.layout.spec(self.model.targets))

    @property
    def owned(self) -> dict[str, Array]:
        return {key: part for group in self.groups for key, part in group.segments(group.parameters).items()}

    def decays(self, key: str) -> bool:
        return key.endswith("/decayed")

    def named(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return self._in_order({k: v for group in self.groups for k, v in group.join(arrays).items()})

    def _views(self, flat: Callable[[ParameterGroup], Array]) -> dict[str, Array]:
        return self._in_order({k: v for group in self.groups for k, v in group.views(flat(group)).items()})

    def _in_order(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """In the model's order, which is the same on all ranks: collectives walk over names."""
        return {name: arrays[name] for name in self._described}

    def _counted_gradients(self) -> list[Array]:
        return self._counted

    # --- forward and backward ----------------------------------------------------------------------------

    def forward(self, x: Array, at: At | None = None) -> Array:
        """Outputs of this rank's block of inputs, at the model's first positions unless ``at`` says else."""
        self.model.check_inputs(x)
        x = self.backend.asarray(x)
        if at is None:
            at = self._at(x, self._samples(self._whole(x.shape[0])) if self.is_training else None)
        saved_by_layer = []
        for (name, layer), p in zip(self.model.layers, self._weights, strict=True):
            x, saved = layer.forward(self._shards[name], p, x, at)
            if at.training:
                saved_by_layer.append(saved)
        self.tape.push(saved_by_layer)
        return x

    def backward(self, grads: Array) -> dict[str, Array]:
        """Gradients by name, summed over the batch: of this one micro-batch alone."""
        self._begin_gradients()
        self._backward(grads, last=True)
        self._reducer.finish()
        return {name: gradient.copy() for name, gradient in self._gradients.items()}

    def _backward(self, dy: Array, last: bool) -> None:
        """Add the current micro-batch's gradients; after the last one, start their reductions."""
        saved_by_layer = self.tape.pop()
        for i in reversed(range(len(self.model.layers))):
            name, layer = self.model.layers[i]
            sh = self._shards[name]
            dy, rest = layer.backward_input(sh, self._weights[i], saved_by_layer.pop(), dy)
            layer.backward_weight(sh, rest, self._sums[i])
            del rest
            if last:
                self._sums[i].settle()
                self._reducer.layer_done(self._uses[i])
        self.input_gradient = dy

    def _samples_of(self, batch: Batch) -> list[Array]:
        """Global numbers of each micro-batch's samples on this rank; counted where the batch does not say."""
        numbers, first = [], 0
        for micro in batch.micro_batches:
            if micro.samples is None:
                whole = self._whole(len(micro.inputs))
                numbers.append(self._samples(whole, first))
                first += whole
            else:
                numbers.append(micro.samples)
        return numbers

    def _whole(self, here: int) -> int:
        """How many samples all ranks have together, of which ``here`` are this rank's."""
        axes = Spec.parse(self.input_sharding).dims[0][1]
        return int(self.all_reduce(np.array(here), over=axes, label="samples")) if axes else here

    def _samples(self, whole: int, first: int = 0) -> Array:
        """This rank's numbers of ``whole`` samples that are numbered from ``first``."""
        part = self.batch_span(whole)
        return self.backend.xp.arange(first + part.start, first + part.stop)

    def _at(self, x: Array, samples: Array | None, step: int = 0) -> At:
        xp = self.backend.xp
        length = x.shape[1] if x.ndim > 1 else 1
        inside = xp.arange(length)  # x is cut along s as inside; the stream may be cut further
        residual = inside[Shards(self.mesh, self.layout).span("s", length, "residual")]
        samples = xp.asarray(samples) if samples is not None else None
        return At(inside, residual, samples, step, self.seed, training=self.is_training)

    # --- training ----------------------------------------------------------------------------------------

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        """As ShardedEngine.step; gradients are reduced once, after the last micro-batch."""
        count = self.count(batch)
        self._begin_gradients()
        samples = self._samples_of(batch)
        total, left = 0.0, len(batch.micro_batches)
        gradients: dict[int, Array] = {}
        for instruction in self.schedule(len(batch.micro_batches)):
            m = instruction.m
            with self.micro_batch(m):
                match instruction:
                    case schedules.Forward():
                        micro = batch.micro_batches[m]
                        outputs = self.forward(micro.inputs, self._at(micro.inputs, samples[m], batch.step))
                        options = micro.loss_options(count)
                        value, gradients[m] = (loss or self.loss)(outputs, micro.targets, **options)
                        total += value
                    case schedules.Backward():
                        left -= 1
                        self._backward(gradients.pop(m), last=left == 0)
                    case _:
                        raise UsageError(f"this engine cannot execute {instruction}")
        self._reducer.finish()
        self.gradients = {k: part for group in self.groups for k, part in group.segments(group.gradients).items()}
        return self._sum_over_batch(total)

    def loss(self, outputs: Array, targets: Array, **options: Any) -> tuple[float, Array]:
        """The model's own loss of this rank's blocks."""
        if options.get("mask") is not None:
            options["mask"] = self.backend.asarray(options["mask"])
        self.model.check_targets(targets)
        targets = self.backend.asarray(targets)
        return self.model.loss(Shards(self.mesh, self.layout, "loss"), outputs, targets, **options)

    def _begin_gradients(self) -> None:
        """Make ready for new sums, also after a step that an exception broke off."""
        self._untouched.update(self._gradients)
        self._reducer.begin()


def _tree(names: Mapping[str, str], arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Arrays by a layer's own names; "norm/scale" stands at ["norm"]["scale"]."""
    tree: dict[str, Any] = {}
    for own, full in names.items():
        *path, leaf = own.split("/")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[leaf] = arrays[full]
    return tree
