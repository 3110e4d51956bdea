"""What layers return in addition to their outputs: updates of their buffers, auxiliary losses, and counts."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import reduce
from itertools import count, groupby
from math import prod

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.comm import Mesh, Pending
from spmd_engine.engine.state.array_table import BUFFER, FROZEN, ArrayTable
from spmd_engine.engine.state.assignment import PIPE
from spmd_engine.engine.zero.storage import start_copies, wait_for_all
from spmd_engine.layers import Buffer, Extra, ForwardContext, Layer, SideOutput
from spmd_engine.models import Model
from spmd_engine.sharding import Layout, Shards
from spmd_engine.sharding.groups import Home


class Buffers:
    """The buffers of this rank's layers, by full name, and their updates until these are applied.

    ``layers`` are those that this rank holds, with the stages that hold them; the first of these computes the updates.
    """

    def __init__(
        self,
        model: Model,
        layers: Mapping[int, tuple[int, ...]],
        mesh: Mesh,
        layout: Layout,
        table: ArrayTable,
        backend: Backend,
        elsewhere: Container[str] = (),
    ) -> None:
        """``elsewhere`` are the names of sharded buffers: see ``FrozenStore``."""
        shards = Shards(mesh, layout)
        self._mesh, self._names = mesh, {number: name for number, (name, _) in enumerate(model.layers)}
        self._described: dict[str, Buffer] = {}
        self._axes: dict[str, tuple[str, ...]] = {}  # over which updates are unreduced
        self._updates: dict[str, dict[int, Array]] = {}  # by name and micro-batch
        self._of_layer: dict[int, dict[str, Array]] = {}
        self._on_stages: dict[tuple[int, ...], list[str]] = {}  # that change and are on several stages
        self.arrays: dict[str, Array] = {}
        self.index: dict[str, tuple[slice, ...]] = {}  #: this rank's part of the whole buffer
        for number, stages in layers.items():
            name, layer = model.layers[number]
            for local_name, buffer in layer.buffers.items():
                if buffer.element is not None and not _holds_element(buffer.element, name, layer, mesh, layout):
                    continue
                full_name, spec = f"{name}/{local_name}", layout.spec(buffer.dims)
                if full_name in elsewhere:
                    continue
                shape = buffer.whole(layer.sizes)
                self._described[full_name] = buffer
                self._axes[full_name] = shards.axes(buffer.summed, buffer.where)
                self.index[full_name] = spec.block(shape, mesh)
                kept_in = table[FROZEN if buffer.frozen else BUFFER].dtype
                self.arrays[full_name] = backend.xp.full(spec.local_shape(shape, mesh), buffer.initial, kept_in)
                self._of_layer.setdefault(number, {})[local_name] = self.arrays[full_name]
                if len(stages) > 1 and not buffer.frozen:
                    self._on_stages.setdefault(stages, []).append(full_name)

    def of_layer(self, number: int) -> dict[str, Array]:
        """A layer's buffers by local name."""
        return self._of_layer.get(number, {})

    def begin(self) -> None:
        """Drop the updates of a step that was not applied."""
        self._updates.clear()

    def take(self, number: int, micro_batch: int, updates: Mapping[str, Array]) -> None:
        """Store the updates of a layer's forward."""
        for local_name, update in updates.items():
            self._updates.setdefault(f"{self._names[number]}/{local_name}", {})[micro_batch] = update

    def is_unreduced(self, number: int, name: str) -> bool:
        """Whether the updates of a layer's buffer are summed over ranks."""
        return bool(self._axes[f"{self._names[number]}/{name}"])

    def apply(self) -> None:
        """Fold the updates of all micro-batches into the buffers, and send those to the stages that only hold them.

        Collective over the axes that shard some of them.
        """
        waiting: dict[tuple[str, ...], dict[str, Array]] = {}
        for name, by_micro_batch in self._updates.items():
            dtype, parts = self.arrays[name].dtype, [by_micro_batch[m] for m in sorted(by_micro_batch)]
            stacked = parts[0][None] if len(parts) == 1 else backend_of(parts[0]).xp.stack(parts)
            stacked = stacked.astype(dtype, copy=False)
            if self._described[name].per_step:
                stacked = stacked.sum(axis=0, keepdims=True)
            waiting.setdefault(self._axes[name], {})[name] = stacked
        for axes, updates in waiting.items():
            if axes:  # by one collective
                sums = self._mesh.group(axes).all_reduce(_flat([*updates.values()]), label="buffers")
                updates = _split(sums, updates)
            for name, stacked in updates.items():
                array = self.arrays[name]
                array[...] = reduce(self._described[name].fold, stacked, array)
        self._updates.clear()
        for stages, names in self._on_stages.items():
            flat = _flat([self.arrays[name] for name in names])
            wait_for_all(start_copies(self._mesh.group(PIPE), flat, stages[0], stages, "buffers"))
            for name, values in _split(flat, {name: self.arrays[name] for name in names}).items():
                self.arrays[name][...] = values


def _holds_element(element: tuple[str, int], name: str, layer: Layer, mesh: Mesh, layout: Layout) -> bool:
    """Whether the layout gives this element of a letter, such as an expert, to this rank."""
    letter, number = element
    return Home(layout.axes(letter), layout.parts(name, letter, layer.sizes[letter], mesh)[number]).has(mesh)


def _flat(arrays: Sequence[Array]) -> Array:
    return backend_of(arrays[0]).xp.concatenate([array.reshape(-1) for array in arrays])


def _split(flat: Array, like: Mapping[str, Array]) -> dict[str, Array]:
    """The parts of a flat array in the shapes of the arrays ``like`` them, by name."""
    ends = np.cumsum([array.size for array in like.values()])[:-1].tolist()
    return {name: part.reshape(like[name].shape) for name, part in zip(like, np.split(flat, ends), strict=True)}


class SideOutputs:
    """The side outputs of all layers of a model in one step, summed so that every rank has them."""

    def __init__(self, model: Model, mesh: Mesh, layout: Layout) -> None:
        shards = Shards(mesh, layout)
        self._mesh, self._names = mesh, {number: name for number, (name, _) in enumerate(model.layers)}
        self._places: dict[str, tuple[slice, tuple[int, ...], tuple[slice, ...]]] = {}
        self._counted: dict[str, bool] = {}  # whether a sum counts this rank's values; else they are replicas
        self._described: dict[str, SideOutput] = {}
        end = 0
        for name, layer in model.layers:
            for local_name, output in layer.side_outputs.items():
                shape, spec = tuple(layer.sizes[x] for x in output.dims.split()), layout.spec(output.dims)
                full_name, begin, end = f"{name}/{local_name}", end, end + prod(shape)
                self._places[full_name] = slice(begin, end), shape, spec.block(shape, mesh)
                differing = {PIPE, *shards.axes(output.summed, output.where), *spec.axes}
                self._counted[full_name] = all(
                    mesh.coordinates[axis] == 0 for axis in mesh.axes if axis not in differing
                )
                self._described[full_name] = output
        self._sums = np.zeros(end)
        self._on_device: list[tuple[str, float, Array]] = []  # outputs of this step, each with its weight

    def begin(self) -> None:
        """Prepare for a step."""
        self._sums[...] = 0
        self._on_device.clear()

    def take(self, number: int, share: float, outputs: Mapping[str, Array | float]) -> None:
        """Add what a layer's forward returned for a micro-batch; ``share`` weighs its losses."""
        for local_name, value in outputs.items():
            name = f"{self._names[number]}/{local_name}"
            if self._counted[name]:
                place, shape, block = self._places[name]
                weight = share if self._described[name].loss else 1.0
                if hasattr(value, "shape") and backend_of(value).on_device:
                    self._on_device.append((name, weight, value))
                else:
                    on_host = backend_of(value).to_host(value) if hasattr(value, "shape") else value
                    self._sums[place].reshape(shape)[(..., *block)] += weight * np.asarray(on_host)

    def start_sum(self) -> Pending:
        """Begin to sum the side outputs over all ranks. Collective over the world if the model has any."""
        self._fetch()
        if not self._sums.size:
            return Pending.completed(self._sums)
        return self._mesh.group().start_all_reduce(self._sums.copy(), label="side outputs")

    def _fetch(self) -> None:
        """Add the values that are on a device, copied to the host at once."""
        if not self._on_device:
            return
        waiting, self._on_device = self._on_device, []
        backend = backend_of(waiting[0][2])
        xp = backend.xp
        waiting.sort(key=lambda entry: entry[2].dtype.str)
        alike = [
            [value.reshape(-1) for *_, value in part] for _, part in groupby(waiting, lambda entry: entry[2].dtype)
        ]
        flat = [xp.concatenate(part).astype(xp.float64) for part in alike]  # each dtype at once
        values, end = backend.to_host(xp.concatenate(flat)), 0
        for name, weight, value in waiting:
            place, shape, block = self._places[name]
            begin, end = end, end + value.size
            self._sums[place].reshape(shape)[(..., *block)] += weight * values[begin:end].reshape(value.shape)

    def by_name(self, sums: np.ndarray) -> dict[str, np.ndarray]:
        """Each side output, whole: the mean of a loss over the micro-batches, the sum of others."""
        return {name: sums[place].reshape(shape) for name, (place, shape, _) in self._places.items()}

    def loss(self, sums: np.ndarray) -> float:
        """The sum of all auxiliary losses."""
        losses = (place for name, (place, _, _) in self._places.items() if self._described[name].loss)
        return float(sum(sums[place].sum() for place in losses))


class Extras:
    """What the forwards of a step return in addition to their outputs."""

    def __init__(self, buffers: Buffers, side_outputs: SideOutputs) -> None:
        self.buffers, self.side_outputs = buffers, side_outputs
        self.passes = count()  #: numbers of the micro-batches outside a step, since the last update

    def begin(self) -> None:
        """Prepare for a step, also after one that was skipped or failed."""
        self.buffers.begin()
        self.side_outputs.begin()
        self.passes = count()

    def apply(self) -> None:
        """Apply the updates of the buffers, after the optimizer's. Collective over the axes that sum some of them."""
        self.buffers.apply()
        self.passes = count()

    def take(self, number: int, ctx: ForwardContext, extra: Extra) -> None:
        """Store what the layer with this number returned for a micro-batch."""
        self.buffers.take(number, ctx.micro_batch, extra.updates)
        self.side_outputs.take(number, ctx.share, extra.outputs)

    def take_whole(self, number: int, ctx: ForwardContext, extra: Extra, counts: bool) -> None:
        """As ``take``, of all samples of the micro-batch: the owners of a helper rank have the same, and it ``counts``
        on one of them."""
        updates = {
            name: update
            if counts or not self.buffers.is_unreduced(number, name)
            else backend_of(update).xp.zeros_like(update)
            for name, update in extra.updates.items()
        }
        self.buffers.take(number, ctx.micro_batch, updates)
        if counts:
            self.side_outputs.take(number, ctx.share, extra.outputs)
