"""The assignment of a rank: chunks of layers, their parameters, and the groups in which these are stored and reduced.

It is a pure function of the model, a position on a mesh (which need not exist) and the options. The engine uses it;
``inspect`` and ``show`` print it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_engine.axes import PIPE, MeshPosition, count_ranks, uneven_axes
from spmd_engine.comm.blocks import span
from spmd_engine.engine.offload.config import Offload
from spmd_engine.engine.state.array_table import ArrayTable, array_table
from spmd_engine.engine.zero.compression import compression
from spmd_engine.errors import UsageError
from spmd_engine.layers import Buffer, Parameter
from spmd_engine.models import Model
from spmd_engine.requirements import Case, Requirement, effect_along, effect_if, requirement
from spmd_engine.sharding import Rectangle, Shards
from spmd_engine.sharding.groups import CAP, THRESHOLD, Home, Member, ParameterGroup, Sum, make_groups
from spmd_engine.sharding.layout import TENSOR, Layout
from spmd_engine.units import numbers_of

if TYPE_CHECKING:
    from spmd_engine.engine.parallel_config import ParallelConfig

Index = tuple[slice, ...]  #: a rectangle of a whole array
#: How layers become chunks: evenly by number or by cost, or the first layer of each chunk.
Division = str | Sequence[int]


def parse_division(text: str) -> Division:
    """``"even"``, ``"cost"`` or ``"0,3,7"`` (the first layer of each chunk); raises UsageError otherwise."""
    if text in ("even", "cost"):
        return text
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(
            f"cannot read stages {text!r}: write even, cost, or the first layer of each, as in 0,3,7"
        ) from None


def divide(model: Model, chunks: int, division: Division = "even", per_stage: int = 1) -> list[range]:
    """The model's layers as ``chunks`` consecutive ranges of at least one layer; each stage has ``per_stage`` of them.

    Raises UsageError if that is impossible.
    """
    layers = len(model.layers)
    if chunks > layers:
        stages = f"{chunks // per_stage} stages" + (f" of {per_stage} chunks" if per_stage > 1 else "")
        raise UsageError(
            f"{model.name} has {layers} layers ({_listed([name for name, _ in model.layers])}), too few for {stages}; "
            f"take fewer stages{', or fewer chunks' if per_stage > 1 else ''}"
        )
    if division == "even":
        parts = [span(layers, chunks, number) for number in range(chunks)]
        return [range(part.start, part.stop) for part in parts]
    if division == "cost":
        return _balanced([layer.cost(model.context) for _, layer in model.layers], chunks)
    starts = [int(first) for first in division]
    if len(starts) != chunks or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= layers:
        raise UsageError(
            f"stages {','.join(map(str, starts))}: {chunks} ascending numbers are needed, the first of them 0 and the "
            f"last below {layers}, the number of layers of {model.name}"
        )
    return [range(first, end) for first, end in zip(starts, [*starts[1:], layers], strict=True)]


#: Layers that both stages at a boundary hold: so many on each side, or for each boundary the first, and one past the
#: last. The boundary may then move within them, without parameters or state.
Overlap = int | tuple[tuple[int, int], ...]


def parse_overlap(text: str | None) -> Overlap:
    """``"2"``, or ``"4:8,9:12"``: from layer 4 up to, and without, 8; None as 0. Raises UsageError otherwise."""
    ranges = [part.split(":") for part in (text or "0").split(",")]
    fits = {len(part) for part in ranges} == {2} or len(ranges) == len(ranges[0]) == 1
    if not fits or not all(number.isdecimal() for part in ranges for number in part):
        raise UsageError(
            f"cannot read --overlap-layers {text!r}: write the layers on each side of a boundary, as in 2 (0: none), "
            "or for each boundary the first layer and the one after the last, as in 4:8,9:12"
        )
    return int(ranges[0][0]) if len(ranges[0]) == 1 else tuple((int(first), int(end)) for first, end in ranges)


def overlaps(chunks: Sequence[range], overlap: Overlap) -> tuple[tuple[int, int], ...]:
    """The overlap at each boundary between stages of one chunk: its first layer, and the one after its last.

    Raises UsageError if it is empty or beyond the last layer, or a boundary is outside.
    """
    starts, layers = [chunk.start for chunk in chunks[1:]], chunks[-1].stop
    if isinstance(overlap, int):
        if overlap > (most := max(max(start, layers - start) for start in starts)):
            raise UsageError(f"--overlap-layers {overlap}: no boundary has more than {most} layers on a side")
        return tuple((max(0, start - overlap), min(layers, start + overlap)) for start in starts)
    if len(overlap) != len(starts):
        raise UsageError(f"--overlap-layers has {len(overlap)} ranges for {len(starts)} boundaries between stages")
    for start, (first, end) in zip(starts, overlap, strict=True):
        if not first < end <= layers:
            raise UsageError(f"--overlap-layers {first}:{end}: give a first layer, and an end after it, up to {layers}")
        if not first <= start <= end:
            raise UsageError(
                f"--overlap-layers {first}:{end}: a stage begins with layer {start}, which is outside; choose stages "
                f"that begin with layers {first} to {end}, or a number as the overlap"
            )
    return overlap


@requirement("stages", nearest="Omit it", left_out=("stages",))
def _pipeline_of_stages(case: Case) -> str | None:
    """a pipeline, if layers are numbered"""
    division, chunks = case.options.division, case.options.chunks or 1
    has_none = case.axes.get(PIPE, 1) == 1 and not isinstance(division, str) and len(division) != chunks
    return "the mesh has no pipeline" if has_none else None


@requirement("mesh", "schedule", "chunks", nearest="Take fewer", of_model=True, left_out=("schedule", "chunks"))
def _layers_of_chunks(case: Case) -> None:
    """a layer for each chunk of a stage, or more"""
    per_stage = case.options.schedule_on(case.axes).chunks
    divide(case.model, case.axes.get(PIPE, 1) * per_stage, per_stage=per_stage)


@requirement("stages", nearest="Give other numbers", of_model=True, left_out=("stages",))
def _first_layers_of_chunks(case: Case) -> None:
    """the first layer of each chunk"""
    case.options.chunks_on(case.axes, case.model)


@requirement("overlap_layers", "mesh", nearest="Add --overlap-layers 0", left_out=("overlap_layers",))
def _overlap_of_equal_stages(case: Case) -> bool:
    """it needs stages of equal sizes"""
    return bool(uneven_axes(case.axes) and case.options.storage.overlap)


@requirement(
    "overlap_layers",
    "schedule",
    nearest="Add --overlap-layers 0, or choose --schedule 1f1b",
    of_model=True,
    left_out=("schedule", "chunks", "overlap_layers"),
)
def _overlap_of_single_chunks(case: Case) -> bool:
    """stages of several chunks cannot overlap"""
    return bool(case.options.schedule_on(case.axes).chunks > 1 and case.options.storage.overlap)


@requirement("overlap_layers", nearest="Give other layers", of_model=True, left_out=("stages", "overlap_layers"))
def _overlap_of_neighbours(case: Case) -> None:
    """layers around the boundaries between stages"""
    if case.axes.get(PIPE, 1) > 1:
        overlaps(case.options.chunks_on(case.axes, case.model), case.options.storage.overlap)


_OF_STAGES = (
    _pipeline_of_stages,
    _layers_of_chunks,
    _first_layers_of_chunks,
    _overlap_of_equal_stages,
    _overlap_of_single_chunks,
    _overlap_of_neighbours,
    *(effect_along(option, PIPE, least=2, listed="pipe of 2 or more") for option in ("stages", "overlap_layers")),
)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) < 6 else [*names[:3], "...", names[-1]])


def _balanced(costs: Sequence[float], parts: int) -> list[range]:
    """Consecutive parts that minimize the cost of the costliest part."""
    low, high = max(costs), sum(costs)
    for _ in range(60):  # bisection to beyond the precision of a double
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(costs, middle, parts)) <= parts else (middle, high)
    ranges = _filled(costs, high, parts)
    while len(ranges) < parts:  # more parts reduce no cost, but every part must have a layer
        longest = max(ranges, key=len)
        at, middle = ranges.index(longest), (longest.start + longest.stop) // 2
        ranges[at : at + 1] = [range(longest.start, middle), range(middle, longest.stop)]
    return ranges


def _filled(costs: Sequence[float], most: float, parts: int) -> list[range]:
    """Parts filled in order up to ``most`` each; one part too many if ``most`` is too little."""
    starts, filled = [0], 0.0
    for number, cost in enumerate(costs):
        if number and filled + cost > most * (1 + 1e-12):
            starts.append(number)
            filled = 0.0
            if len(starts) > parts:
                break
        filled += cost
    return [range(first, end) for first, end in zip(starts, [*starts[1:], len(costs)], strict=True)]


# --- Unequal ranks: the shares of ranks along an axis in the work, or in the sharded state
#
# The two shares differ: work is shared by speed, state by memory.


Shares = Mapping[str, tuple[int, ...]]

BATCH = ("data", "replicate", "shard", "expert")  #: axes that shard samples, and between layers nothing else
#: The axes that can have shares of the work, with the smallest share.
WORK: Mapping[str, int] = {**dict.fromkeys(BATCH, 1), **dict.fromkeys((*TENSOR, "row", "col", "rows", "columns"), 0)}
#: The axes over which state is sharded, with the smallest share.
STATE: Mapping[str, int] = dict.fromkeys(("data", "shard", "expert", "context"), 0)


def parse_shares(text: str | None, option: str, known: Mapping[str, int]) -> Shares:
    """``"data=3:1"`` as {"data": (3, 1)}, with commas between several axes; None and "" as no shares.

    ``known`` are the axes that can have shares, with the smallest valid one. Raises UsageError if the text cannot be
    parsed, or names another axis.
    """
    shares: dict[str, tuple[int, ...]] = {}
    for term in filter(None, (part.strip() for part in (text or "").split(","))):
        axis, equals, numbers = term.partition("=")
        counts = numbers.split(":")
        if not equals or axis in shares or not all(number.isdecimal() for number in counts):
            raise UsageError(
                f"cannot read {option} {text!r} at {term!r}; write whole numbers, each rank's share, as in data=3:1"
            )
        shares[axis] = tuple(map(int, counts))
        if axis not in known:
            raise UsageError(f"{option} {text}: axis {axis!r} takes no shares; choose among {', '.join(known)}")
        if min(shares[axis]) < known[axis] or not any(shares[axis]):
            allowed = "from 1" if known[axis] else "from 0, and one is above"
            raise UsageError(f"{option} {text}: shares of {axis} are {allowed}")
    return shares


def parse_order(text: str | None) -> tuple[int, ...] | None:
    """``"2,0,1"``, the rank at each position of the mesh, as ``Mesh`` takes it; None: node by node."""
    return numbers_of(text, "--rank-order", "the numbers of ranks, as in 2,0,1") if text is not None else None


def misfit(shares: Shares, axes: Mapping[str, int]) -> str | None:
    """The reason why shares do not fit a mesh of these axes; None if they fit."""
    for axis, numbers in shares.items():
        if axis not in axes:
            return f"there is no axis {axis!r}"
        if len(numbers) != axes[axis]:
            return f"it says {len(numbers)} shares of {axis}, which has {axes[axis]} ranks"
    return None


def shares_along(along: Sequence[str], axes: Mapping[str, int], shares: Shares) -> tuple[int, ...]:
    """The share of each rank along several axes, the last of which varies fastest; () for equal shares."""
    if not any(axis in shares for axis in along):
        return ()
    return tuple(map(prod, product(*(shares.get(axis, (1,) * axes[axis]) for axis in along))))


def shares_text(shares: Shares) -> str:
    """Shares as text that ``parse_shares`` reads."""
    return ",".join(f"{axis}={':'.join(map(str, numbers))}" for axis, numbers in shares.items())


def _fits(option: str, shares: Callable[[ParallelConfig], Shares]) -> Requirement:
    def unmet(case: Case) -> str | None:
        return misfit(shares(case.options), case.axes)

    needs, nearest = "as many shares as an axis has ranks", "Give a share for each rank of an axis"
    return Requirement(f"axes of {option}", (option, "mesh"), needs, unmet, nearest, left_out=(option,))


@requirement("rank_order", nearest="Name each rank once", left_out=("rank_order",))
def _order_of_ranks(case: Case) -> str | None:
    """each rank of the mesh once"""
    order, ranks = case.options.order, count_ranks(case.axes)
    return f"the ranks are 0 to {ranks - 1}" if order is not None and sorted(order) != list(range(ranks)) else None


_OF_UNEQUAL_RANKS = (
    _fits("shares", lambda options: options.work_shares),
    _fits("state_shares", lambda options: options.storage.shares),
    _order_of_ranks,
)


# --- The assignment: chunks of layers, their parameters, and the groups in which these are stored and reduced


@dataclass(frozen=True)
class ZeroConfig:
    """How parameters, gradients and optimizer state are stored.

    ``zero`` is the ZeRO stage: 0 replicates all state over the batch axes, 1 shards the optimizer state, 2 also the
    gradients, 3 also the parameters (fully sharded). None: 3 if the mesh has an axis ``shard``, else 0; state is then
    sharded over ``shard`` and ``context``, and replicated along ``data`` and ``expert``. A stage that is given shards
    over those, too. Ranks along ``replicate`` always keep replicas.
    """

    zero: int | None = None
    threshold: int = THRESHOLD  #: bytes at which a group is closed
    cap: int = CAP  #: bytes beyond which no neighbour joins a group
    compress: str = "none"  #: the compression of gradients: see ``compression``
    shares: Shares = field(default_factory=dict)  #: shares of ranks along an axis in sharded state; else equal
    min_tensor_size: int = 0  #: bytes below which a parameter's state is not sharded
    places: Offload = Offload()  #: what lives elsewhere while it is not in use
    overlap: Overlap = 0  #: the layers that both stages at a boundary hold

    def stage(self, axes: Mapping[str, int]) -> int:
        """The ZeRO stage on a mesh with these axes. Raises UsageError for an unknown stage."""
        if self.zero is None:
            return 3 if "shard" in axes else 0
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"zero stage {self.zero}: it is 1, 2 or 3, or 0 for none")
        return self.zero

    def table(
        self, axes: Mapping[str, int], sharded_axes: tuple[str, ...], dtype: np.dtype, *, trained: bool = True
    ) -> ArrayTable:
        """Where the arrays of a parameter group live on a mesh with these ``axes``, of which some shard its state."""
        feeds_back = compression(self.compress).feeds_back
        how: dict[str, Any] = {"places": self.places.by_kind, "trained": trained, "feeds_back": feeds_back}
        return array_table(self.stage(axes), sharded_axes, dtype, **how)

    def sharded_axes(self, summed: tuple[str, ...], axes: Mapping[str, int]) -> tuple[str, ...]:
        """The axes, of those over which a gradient is summed, that shard its parameter's state."""
        if self.stage(axes) == 0:
            return ()
        replicas = {"replicate"} if self.zero is not None else {"replicate", "data", "expert"}
        return tuple(axis for axis in summed if axis not in replicas)

    def sum_of(
        self,
        size: int,
        summed: tuple[str, ...],
        axes: Mapping[str, int],
        stages: tuple[int, ...] = (),
        computed_on: tuple[int, ...] = (),
    ) -> Sum:
        """How the gradient of a parameter of ``size`` bytes is summed, and over which axes its state is sharded."""
        sharded_axes = self.sharded_axes(summed, axes) if size >= self.min_tensor_size else ()
        return Sum(summed, sharded_axes, stages, shares_along(sharded_axes, axes, self.shares), computed_on)


@requirement("mesh", "zero", nearest="Name it data, or add shard", subject="axis 'replicate'")
def _replicas_of_shards(case: Case) -> str | None:
    """an axis replicate only beside an axis shard, or with ZeRO"""
    has_none = "replicate" in case.axes and "shard" not in case.axes and not case.options.zero
    return "it says that state is in parts over another axis" if has_none else None


def _if_in_parts(option: str) -> Requirement:
    otherwise = "without --zero: nothing is stored in parts"
    return effect_if(option, lambda case: case.options.storage.stage(case.axes), "--zero", otherwise)


REQUIREMENTS = (
    _replicas_of_shards,
    *_OF_UNEQUAL_RANKS,
    *_OF_STAGES,
    effect_along("zero", "data", "expert", "shard", "context", listed="data, shard or context to store over"),
    *map(_if_in_parts, ("state_shares", "min_tensor_size")),
)


@dataclass(frozen=True)
class Assignment:
    """One rank's share of a model."""

    chunks: Sequence[range]  #: the layers of every chunk, of all stages
    mine: Sequence[int]  #: the numbers of this rank's chunks
    uses: Mapping[int, Mapping[str, str]]  #: this rank's layer -> local name -> full name
    holders: Mapping[str, tuple[int, ...]]  #: stages that hold each parameter, of the whole model
    groups: Sequence[ParameterGroup]
    homes: Mapping[str, Home] = field(default_factory=dict)  #: those of parameters that not all ranks of a stage have
    #: Groups of sharded frozen buffers, and the names of these by layer, as in ``uses``.
    frozen: Sequence[ParameterGroup] = ()
    frozen_uses: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    #: the layers that this rank holds -> the stages that hold them, the first of which computes them
    held: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

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
    held: dict[int, tuple[int, ...]] = {layer: (chunk % count,) for layer, chunk in chunk_of.items()}
    if storage.overlap and count > 1:
        if chunks_per_stage > 1:
            raise UsageError("--overlap-layers needs one chunk a stage: choose another schedule than interleaved")
        if uneven_axes(place.all_axes):
            raise UsageError(f"--overlap-layers needs stages of equal sizes, unlike those of --mesh {place}")
        for upper, (first, end) in enumerate(overlaps(chunks, storage.overlap), 1):
            for layer in range(first, end):
                held[layer] = tuple(dict.fromkeys((*held[layer], upper - 1, upper)))
    # Of each layer: the local names of its parameters -> their full names.
    all_uses = [{key: layer.tied.get(key, f"{name}/{key}") for key in layer.parameters} for name, layer in model.layers]
    users: dict[str, list[int]] = {}  # layers that use a parameter
    for layer, names in enumerate(all_uses):
        for full_name in names.values():
            users.setdefault(full_name, []).append(layer)
    holders = {
        name: tuple(sorted({other for layer in using for other in held[layer]})) for name, using in users.items()
    }
    mine = [number for number in range(len(chunks)) if number % count == stage]
    homes = homes_of(model, layout, place)

    placed = cache(partial(_placed, place, layout, itemsize, storage))  # layers of one kind have the same result

    def member(
        name: str, array: Parameter | Buffer, shape: tuple[int, ...], unit: int, *stages: tuple[int, ...]
    ) -> Member:
        block, summed, largest = placed(array, shape, *stages)
        decays, small = isinstance(array, Parameter) and array.decay, largest * itemsize < storage.min_tensor_size
        return Member(name, block, decays, summed, largest, unit, homes.get(name), small)

    def groups_here(members: Sequence[Member], kind: str = "group") -> list[ParameterGroup]:
        groups = make_groups(members, itemsize, storage.threshold, storage.cap, kind)
        return [group for group in groups if group.home is None or group.home.has(place)]

    members = []
    for number, (name, (parameter, shape)) in enumerate(model.parameters()):
        if stage in holders[name]:
            using, stages_of_sum = users[name], ()
            unit = min(chunk_of[layer] for layer in using if stage in held[layer])
            if len(holders[name]) > 1:
                # Other parameters of these stages differ, but for those of the same layer. They are grouped as they
                # would be if the boundary were elsewhere, so that it can move without them.
                unit = len(chunks) + (using[0] if len(using) == 1 else len(model.layers) + number)
                computed_on = tuple(sorted({held[layer][0] for layer in using}))
                stages_of_sum = holders[name], () if computed_on == holders[name] else computed_on
            members.append(member(name, parameter, shape, unit, *stages_of_sum))
    layers = [layer for number in mine for layer in chunks[number]]
    here = {layer: stages for layer, stages in sorted(held.items()) if stage in stages}
    frozen = [
        member(f"{name}/{local_name}", buffer, buffer.whole(described.sizes), unit)
        for layer in (here if storage.stage(place.axes) == 3 else ())
        for name, described in [model.layers[layer]]
        for unit in [len(chunks) + layer if len(here[layer]) > 1 else chunk_of[layer]]
        for local_name, buffer in described.buffers.items()
        if buffer.frozen
    ]
    # Those that are not sharded have no replicas to shard.
    frozen_groups = groups_here([buffer for buffer in frozen if buffer.summed.sharded], "frozen")
    names = {name for group in frozen_groups for name in group.spans}
    absent_names = {name for name, home in homes.items() if not home.has(place)}
    uses = {
        layer: {name: full_name for name, full_name in all_uses[layer].items() if full_name not in absent_names}
        for layer in layers
    }
    frozen_uses = {
        layer: {
            key: full for key in model.layers[layer][1].buffers if (full := f"{model.layers[layer][0]}/{key}") in names
        }
        for layer in layers
    }
    return Assignment(chunks, mine, uses, holders, groups_here(members), homes, frozen_groups, frozen_uses, here)


def _placed(
    place: MeshPosition,
    layout: Layout,
    itemsize: int,
    storage: ZeroConfig,
    array: Parameter | Buffer,
    shape: tuple[int, ...],
    *stages: tuple[int, ...],
) -> tuple[tuple[int, ...], Sum, int]:
    """An array's block, how its gradient is summed, and the size of the largest block of any rank of the stage."""
    spec = layout.spec(array.dims)
    element_axes = layout.axes(array.element[0]) if array.element else ()
    shards = Shards(place, layout)  # pyright: ignore[reportArgumentType]  # no collective is called, only axes are read
    over = tuple(axis for axis in shards.axes(array.summed, array.where) if axis not in element_axes)
    largest = prod(spec.largest_shape(shape, place))
    return spec.local_shape(shape, place), storage.sum_of(largest * itemsize, over, place.axes, *stages), largest


def owned_rectangle(
    parameter: Parameter,
    shape: tuple[int, ...],
    place: MeshPosition,
    layout: Layout,
    itemsize: int,
    storage: ZeroConfig,
    holding_stages: tuple[int, ...],
) -> Rectangle:
    """The part of a parameter, in a group of its own, that the rank at ``place`` updates."""
    block, summed, largest = _placed(place, layout, itemsize, storage, parameter, shape, holding_stages)
    group = ParameterGroup(0, [Member("", block, parameter.decay, summed, largest)])
    interval = group.intervals(place.axis_size(summed.sharded))[place.index(summed.sharded)]
    first, *others = layout.spec(parameter.dims).block(shape, place)
    rows = group.rows(interval)[""]
    return Rectangle.of((slice(first.start + rows.start, first.start + rows.stop), *others))


def homes_of(model: Model, layout: Layout, mesh: MeshPosition) -> dict[str, Home]:
    """The ranks that have each parameter or frozen weight, such as an expert's, that not all ranks of a stage have."""
    homes, parts = {}, {}
    for name, (layer, (letter, number), count) in model.elements():
        axes = layout.axes(letter)
        if mesh.axis_size(axes) > 1:
            if (layer, letter) not in parts:
                parts[layer, letter] = layout.parts(layer, letter, count, mesh)
            homes[name] = Home(axes, parts[layer, letter][number])
    return homes
