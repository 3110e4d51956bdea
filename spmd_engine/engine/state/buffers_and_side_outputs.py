"""What layers return beside their outputs: updates of their buffers, auxiliary losses, and counts."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import reduce
from math import prod

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import Pending
from spmd_engine.engine.state.assignment import PIPE
from spmd_engine.layers.declarations import Buffer, SideOutput
from spmd_engine.layers.layer import Extra, ForwardContext, Layer
from spmd_engine.models.model import Model
from spmd_engine.sharding.groups import Home
from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.shards import Shards


class Buffers:
    """The buffers of the layers on this rank, by full name, and their updates until these are applied."""

    def __init__(
        self,
        model: Model,
        layers: Iterable[int],
        mesh: Mesh,
        layout: Layout,
        dtype: np.dtype,
        backend: Backend,
        elsewhere: Container[str] = (),
    ) -> None:
        """``elsewhere`` are the names of those that are stored in parts: see ``FrozenStore``."""
        shards = Shards(mesh, layout)
        self._mesh, self._names = mesh, {number: name for number, (name, _) in enumerate(model.layers)}
        self._described: dict[str, Buffer] = {}
        self._axes: dict[str, tuple[str, ...]] = {}  # over which updates are unreduced
        self._updates: dict[str, dict[int, Array]] = {}  # by name and micro-batch
        self._of_layer: dict[int, dict[str, Array]] = {}
        self.arrays: dict[str, Array] = {}
        self.index: dict[str, tuple[slice, ...]] = {}  #: which part of the whole buffer is here
        for number in layers:
            name, layer = model.layers[number]
            for own, buffer in layer.buffers.items():
                if buffer.element is not None and not _is_here(buffer.element, name, layer, mesh, layout):
                    continue
                full, spec = f"{name}/{own}", layout.spec(buffer.dims)
                if full in elsewhere:
                    continue
                whole = buffer.whole(layer.sizes)
                self._described[full] = buffer
                self._axes[full] = shards.axes(buffer.summed, buffer.where)
                self.index[full] = spec.block(whole, mesh)
                self.arrays[full] = backend.xp.full(spec.local_shape(whole, mesh), buffer.initial, dtype)
                self._of_layer.setdefault(number, {})[own] = self.arrays[full]

    def of_layer(self, number: int) -> dict[str, Array]:
        """A layer's buffers by its own names."""
        return self._of_layer.get(number, {})

    def begin(self) -> None:
        """Forget the updates of a step that was not applied."""
        self._updates.clear()

    def take(self, number: int, micro_batch: int, updates: Mapping[str, Array]) -> None:
        """Keep the updates of a layer's forward."""
        for own, update in updates.items():
            self._updates.setdefault(f"{self._names[number]}/{own}", {})[micro_batch] = update

    def apply(self) -> None:
        """Fold the updates of all micro-batches into the buffers. Collective over the axes that shard some of them."""
        waiting: dict[tuple[str, ...], dict[str, Array]] = {}
        for name, by_micro_batch in self._updates.items():
            xp = backend_of(self.arrays[name]).xp
            in_order = xp.stack([by_micro_batch[m] for m in sorted(by_micro_batch)]).astype(self.arrays[name].dtype)
            if self._described[name].per_step:
                in_order = in_order.sum(axis=0, keepdims=True)
            waiting.setdefault(self._axes[name], {})[name] = in_order
        for axes, updates in waiting.items():
            for name, in_order in (_summed(updates, axes, self._mesh) if axes else updates).items():
                array = self.arrays[name]
                array[...] = reduce(self._described[name].fold, in_order, array)
        self._updates.clear()


def _is_here(element: tuple[str, int], name: str, layer: Layer, mesh: Mesh, layout: Layout) -> bool:
    """Whether the layout gives this element of a letter, such as an expert, to this rank."""
    letter, number = element
    return Home(layout.axes(letter), layout.parts(name, letter, layer.sizes[letter], mesh)[number]).has(mesh)


def _summed(updates: Mapping[str, Array], axes: tuple[str, ...], mesh: Mesh) -> dict[str, Array]:
    """Arrays summed over ranks along ``axes``, by one collective."""
    xp = backend_of(next(iter(updates.values()))).xp
    flat = xp.concatenate([update.reshape(-1) for update in updates.values()])
    flat = mesh.group(axes).all_reduce(flat, label="buffers")
    ends = np.cumsum([update.size for update in updates.values()])[:-1].tolist()
    return {name: part.reshape(updates[name].shape) for name, part in zip(updates, np.split(flat, ends), strict=True)}


class SideOutputs:
    """The side outputs of all layers of a model in one step, as every rank gets them in the end."""

    def __init__(self, model: Model, mesh: Mesh, layout: Layout) -> None:
        shards = Shards(mesh, layout)
        self._mesh, self._names = mesh, {number: name for number, (name, _) in enumerate(model.layers)}
        self._places: dict[str, tuple[slice, tuple[int, ...], tuple[slice, ...]]] = {}
        self._counted: dict[str, bool] = {}  # whether this rank's values count, or others have the same
        self._described: dict[str, SideOutput] = {}
        end = 0
        for name, layer in model.layers:
            for own, output in layer.side_outputs.items():
                shape, spec = tuple(layer.sizes[x] for x in output.dims.split()), layout.spec(output.dims)
                full, begin, end = f"{name}/{own}", end, end + prod(shape)
                self._places[full] = slice(begin, end), shape, spec.block(shape, mesh)
                parted = {PIPE, *shards.axes(output.summed, output.where), *spec.axes}
                self._counted[full] = all(mesh.coordinates[axis] == 0 for axis in mesh.axes if axis not in parted)
                self._described[full] = output
        self._sums = np.zeros(end)

    def begin(self) -> None:
        """Make ready for a step."""
        self._sums[...] = 0

    def take(self, number: int, share: float, outputs: Mapping[str, Array | float]) -> None:
        """Add what a layer's forward returned for a micro-batch; ``share`` weighs its losses."""
        for own, value in outputs.items():
            name = f"{self._names[number]}/{own}"
            if self._counted[name]:
                place, shape, block = self._places[name]
                weight = share if self._described[name].loss else 1.0
                on_host = backend_of(value).to_host(value) if hasattr(value, "shape") else value
                self._sums[place].reshape(shape)[(..., *block)] += weight * np.asarray(on_host)

    def start_sum(self) -> Pending:
        """Begin to sum them over all ranks. Collective over the world if the model has any."""
        if not self._sums.size:
            return Pending.completed(self._sums)
        return self._mesh.group().start_all_reduce(self._sums.copy(), label="side outputs")

    def by_name(self, sums: np.ndarray) -> dict[str, np.ndarray]:
        """Each one, whole: a loss's mean over the micro-batches, and the sum of what is none."""
        return {name: sums[place].reshape(shape) for name, (place, shape, _) in self._places.items()}

    def loss(self, sums: np.ndarray) -> float:
        """The sum of all auxiliary losses."""
        losses = (place for name, (place, _, _) in self._places.items() if self._described[name].loss)
        return float(sum(sums[place].sum() for place in losses))


class Extras:
    """What the forwards of a step return beside their outputs."""

    def __init__(self, buffers: Buffers, side_outputs: SideOutputs) -> None:
        self.buffers, self.side_outputs = buffers, side_outputs
        self._passes = 0

    def begin(self) -> None:
        """Make ready for a step, also after one that was skipped or broke off."""
        self.buffers.begin()
        self.side_outputs.begin()
        self._passes = 0

    def count_pass(self) -> int:
        """A number for a micro-batch that is no part of a step: how many there were before, since the last update."""
        self._passes += 1
        return self._passes - 1

    def apply(self) -> None:
        """With the optimizer's update, that of the buffers. Collective over the axes over which some are summed."""
        self.buffers.apply()
        self._passes = 0

    def take(self, number: int, ctx: ForwardContext, extra: Extra) -> None:
        """Keep what the layer with this number returned for a micro-batch."""
        self.buffers.take(number, ctx.micro_batch, extra.updates)
        self.side_outputs.take(number, ctx.share, extra.outputs)
