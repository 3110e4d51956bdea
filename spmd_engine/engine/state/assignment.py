"""What each rank has: chunks of layers, their parameters, and the groups these are stored and reduced in.

A pure function of the model, a place on a mesh (which need not exist) and the options: the engine builds by it,
``inspect`` and ``show`` print it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod

from spmd_engine.axes import MeshPosition
from spmd_engine.engine.pipeline.stages import Division, divide
from spmd_engine.engine.state.split_weights import Shares, shares_along
from spmd_engine.errors import UsageError
from spmd_engine.layers.declarations import Buffer, Parameter
from spmd_engine.models.model import Model
from spmd_engine.sharding.groups import CAP, THRESHOLD, Home, Member, ParameterGroup, Sum, make_groups
from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.shards import Shards

PIPE = "pipe"


@dataclass(frozen=True)
class ZeroConfig:
    """How parameters, gradients and optimizer state are stored.

    ``zero`` is the stage of ZeRO: 0 whole on every rank of a batch axis, 1 the optimizer's state in parts, 2 the
    gradients too, 3 the parameters too (fully sharded). None: 3 if the mesh has an axis ``shard``, which then,
    with ``context``, is what the parts are dealt over, while ranks along ``data`` and ``expert`` keep replicas. A
    stage that is given holds for those as well. Ranks along ``replicate`` always keep replicas.
    """

    zero: int | None = None
    threshold: int = THRESHOLD  #: bytes at which a group is closed
    cap: int = CAP  #: bytes beyond which no neighbour joins a group
    compress: str = "none"  #: how gradients travel: see ``compression``
    shares: Shares = field(default_factory=dict)  #: of the ranks along an axis, of what is in parts; else as much each
    min_tensor_size: int = 0  #: bytes below which a parameter's state is in no parts

    def stage(self, axes: Mapping[str, int]) -> int:
        """The stage of ZeRO on a mesh with these axes."""
        if self.zero is None:
            return 3 if "shard" in axes else 0
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"zero stage {self.zero}: it is 1, 2 or 3, or 0 for none")
        return self.zero

    def cut(self, summed: tuple[str, ...], axes: Mapping[str, int]) -> tuple[str, ...]:
        """Of the axes over which a gradient is summed, those over which its parameter's state is in parts."""
        if self.stage(axes) == 0:
            return ()
        replicas = {"replicate"} if self.zero is not None else {"replicate", "data", "expert"}
        return tuple(axis for axis in summed if axis not in replicas)

    def sum_of(self, size: int, summed: tuple[str, ...], stages: tuple[int, ...], axes: Mapping[str, int]) -> Sum:
        """How the gradient of a parameter of ``size`` bytes is summed, and who stores what of it."""
        cut = self.cut(summed, axes) if size >= self.min_tensor_size else ()
        return Sum(summed, cut, stages, shares_along(cut, axes, self.shares))


@dataclass(frozen=True)
class Assignment:
    """One rank's share of a model."""

    chunks: Sequence[range]  #: the layers of every chunk, on whichever stage
    mine: Sequence[int]  #: numbers of the chunks here
    uses: Mapping[int, Mapping[str, str]]  #: layer here -> its own names of its parameters here -> full names
    holders: Mapping[str, tuple[int, ...]]  #: stages that hold each parameter, of the whole model
    groups: Sequence[ParameterGroup]
    homes: Mapping[str, Home] = field(default_factory=dict)  #: of parameters that not all ranks of a stage have
    #: Groups of frozen buffers that are stored in parts, and the names of these by layer, as in ``uses``.
    frozen: Sequence[ParameterGroup] = ()
    frozen_uses: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    @property
    def members(self) -> Iterator[Member]:
        return (member for group in self.groups for member in group.members)


def assign(
    model: Model,
    place: MeshPosition,
    layout: Layout,
    itemsize: int,
    *,
    storage: ZeroConfig = ZeroConfig(),  # noqa: B008 (immutable)
    stages: Division = "even",
    chunks_per_stage: int = 1,
) -> Assignment:
    """The share of the rank at ``place``; raises UsageError where layers are too few for the chunks."""
    count, stage = place.axes.get(PIPE, 1), place.coordinates.get(PIPE, 0)
    chunks = divide(model, count * chunks_per_stage, stages, chunks_per_stage)
    chunk_of = {layer: number for number, layers in enumerate(chunks) for layer in layers}
    all_uses = [_parameters_of(name, layer) for name, layer in model.layers]
    chunks_of: dict[str, set[int]] = {}
    for layer, names in enumerate(all_uses):
        for full in names.values():
            chunks_of.setdefault(full, set()).add(chunk_of[layer])
    holders = {name: tuple(sorted({chunk % count for chunk in held})) for name, held in chunks_of.items()}
    mine = [number for number in range(len(chunks)) if number % count == stage]
    homes = homes_of(model, layout, place)
    shards = Shards(place, layout)

    @cache  # layers of a kind are alike
    def placed(
        array: Parameter | Buffer, shape: tuple[int, ...], stages_of_it: tuple[int, ...]
    ) -> tuple[tuple[int, ...], Sum, int]:
        """An array's block, how its gradient is summed, and the size of the largest block of any rank."""
        spec = layout.spec(array.dims)
        brought = layout.axes(array.element[0]) if array.element else ()
        over = tuple(axis for axis in shards.axes(array.summed, array.where) if axis not in brought)
        largest = prod(spec.largest_shape(shape, place))
        summed = storage.sum_of(largest * itemsize, over, stages_of_it, place.axes)
        return spec.local_shape(shape, place), summed, largest

    def member(
        name: str, array: Parameter | Buffer, shape: tuple[int, ...], chunk: int, stages_of_it: tuple[int, ...] = ()
    ) -> Member:
        block, summed, largest = placed(array, shape, stages_of_it)
        decays, small = isinstance(array, Parameter) and array.decay, largest * itemsize < storage.min_tensor_size
        return Member(name, block, decays, summed, largest, chunk, homes.get(name), small)

    members = []
    for name, (parameter, shape) in model.parameters():
        if stage in holders[name]:
            chunk = min(number for number in chunks_of[name] if number in mine)
            members.append(member(name, parameter, shape, chunk, holders[name] if len(holders[name]) > 1 else ()))
    groups = make_groups(members, itemsize, storage.threshold, storage.cap)
    here = [group for group in groups if group.home is None or group.home.has(place)]
    layers = [layer for number in mine for layer in chunks[number]]
    frozen = [
        member(f"{name}/{own}", buffer, buffer.whole(described.sizes), chunk_of[layer])
        for layer in (layers if storage.stage(place.axes) == 3 else ())
        for name, described in [model.layers[layer]]
        for own, buffer in described.buffers.items()
        if buffer.frozen
    ]
    frozen = [each for each in frozen if each.summed.cut]  # of the others nobody else here has a copy
    of_frozen = [
        group for group in make_groups(frozen, itemsize, storage.threshold, storage.cap, "frozen")
        if group.home is None or group.home.has(place)
    ]  # fmt: skip
    names = {name for group in of_frozen for name in group.spans}
    away = {name for name, home in homes.items() if not home.has(place)}
    uses = {
        layer: {own: full for own, full in all_uses[layer].items() if full not in away}
        for number in mine
        for layer in chunks[number]
    }
    frozen_uses = {
        layer: {
            own: full for own in model.layers[layer][1].buffers if (full := f"{model.layers[layer][0]}/{own}") in names
        }
        for layer in layers
    }
    return Assignment(chunks, mine, uses, holders, here, homes, of_frozen, frozen_uses)


def homes_of(model: Model, layout: Layout, mesh: MeshPosition) -> dict[str, Home]:
    """The ranks that have each parameter, or frozen weight, that not all ranks of a stage have: those of an expert."""
    homes, parts = {}, {}
    for name, (layer, (letter, number), count) in model.elements():
        axes = layout.axes(letter)
        if mesh.axis_size(axes) > 1:
            if (layer, letter) not in parts:
                parts[layer, letter] = layout.parts(layer, letter, count, mesh)
            homes[name] = Home(axes, parts[layer, letter][number])
    return homes


def _parameters_of(layer_name: str, layer) -> dict[str, str]:
    """A layer's own names of its parameters to their full names."""
    return {name: layer.tied.get(name, f"{layer_name}/{name}") for name in layer.parameters}
