"""Bytes that each rank of a mesh stores, by kind, under the stages of ZeRO."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

from spmd_engine.arrays.precision import dtype_of
from spmd_engine.axes import MeshPosition, all_positions
from spmd_engine.engine.build import composed_assignment, composed_layout
from spmd_engine.engine.optimizers import OPTIMIZERS, AdamW, Optimizer
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.state.assignment import PIPE
from spmd_engine.engine.zero.storage import bytes_held
from spmd_engine.models import Model
from spmd_engine.pictures import BLUE, GREEN, ORANGE, PURPLE, SKY, Cell, Picture, listed, table, text
from spmd_engine.planning import analyze
from spmd_engine.planning.dry_run.engine import PassCache
from spmd_engine.sharding.groups import ParameterGroup
from spmd_engine.sharding.layout import Layout
from spmd_engine.training.train_config import TrainConfig
from spmd_engine.units import readable_bytes

CLASSES = ("parameters", "gradients", "optimizer state", "largest groups")
FROZEN = "frozen weights"  #: one more class, of models with adapters
FILLS = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer state": GREEN,
    "largest groups": PURPLE,
    FROZEN: SKY,
}
LONGEST_BAR = 72  # columns
MOST_BARS = 12

Held = tuple[tuple[str, int], ...]  # classes with their bytes


def draw_memory(job: TrainConfig, model: Model, composition: ParallelConfig) -> Picture:
    """Bytes of ranks on the mesh of the ``composition``: with a ZeRO stage, a bar for each group of equal ranks, and
    without one, a bar for each stage, of the rank that holds most."""
    axes, stage = dict(composition.mesh or {}), composition.storage.stage(composition.mesh or {})
    side_by_side = composition.zero is None and not composition.assigned
    options = {"dtype": job.model.dtype, "optimizer": OPTIMIZERS[job.training.optimizer](), "cache": PassCache()}
    held = {
        zero: bytes_per_rank(model, axes, composition.changed(zero=zero, offload=None), **options)
        for zero in (range(4) if side_by_side else [stage])
    }
    if side_by_side:
        bars = [(f"zero {zero}", max(ranks, key=_total_bytes)) for zero, ranks in held.items()]
        ranks_shown = "the rank that holds most"
    else:
        bars = _group_equal_ranks(held[stage])
        ranks_shown = f"each rank, zero {stage}"
    notes = ["largest groups: whole for a while, at the worst moment of a step. Activations are not counted."]
    if len(bars) > MOST_BARS:
        notes.insert(0, f"Drawn are the ranks that hold most and least; {len(bars) - 2} others hold something between.")
        bars.sort(key=lambda bar: -_total_bytes(bar[1]))
        bars = [bars[0], bars[-1]]
    count, mesh = f"{model.parameter_count:,}", MeshPosition(axes, {})
    what = f"{job.model.name}, {count} parameters in {job.model.dtype}, {job.training.optimizer}, mesh {mesh}"
    return Picture(f"{what}: bytes on {ranks_shown}", _bars(bars), _numbers(bars), notes)


def _total_bytes(held: Held) -> int:
    return sum(count for _, count in held)


def _group_equal_ranks(ranks: Sequence[Held]) -> list[tuple[str, Held]]:
    """Groups of ranks that hold equal bytes, in the order of their first ranks."""
    groups: dict[Held, list[int]] = defaultdict(list)
    for rank, held in enumerate(ranks):
        groups[held].append(rank)
    return [(f"{'rank' if len(members) == 1 else 'ranks'} {listed(members)}", held) for held, members in groups.items()]


def _bars(bars: Sequence[tuple[str, Held]]) -> list[Cell]:
    """The cells of the bars, which have one scale."""
    left = max(len(name) for name, _ in bars) + 1
    scale = LONGEST_BAR / max(_total_bytes(held) for _, held in bars)
    cells: list[Cell] = []
    for row, (name, held) in enumerate(bars):
        x, y = left, 3 * row
        cells.append(text(0, y + 1, name))
        for kind, count in held:
            if count:
                width = max(2, round(count * scale))
                label = kind if len(kind) + 1 < width else kind[0]
                cells.append(Cell(x, y, width, 2, label, FILLS[kind]))
                x += width
        cells.append(text(x + 2, y + 1, readable_bytes(_total_bytes(held))))
    return cells


def _numbers(bars: Sequence[tuple[str, Held]]) -> list[Cell]:
    rows = [("", *(f"({kind[0]}) {kind}" for kind, _ in bars[0][1]), "together")]
    rows += [(name, *(f"{count:,}" for _, count in held), f"{_total_bytes(held):,}") for name, held in bars]
    return table(rows, "l".ljust(len(rows[0]), "r"))


# --- Bytes of each rank from the engine's assignment, and of its unsharded groups from the analysis of a step


#: Kinds of memory of unsharded groups in the analysis of a step.
_UNSHARDED = ("gathered groups", "whole gradients")
_Parts = tuple[tuple[str, ...], list[int]]  # of a group: the axes that shard its storage, and the size of each part


def bytes_per_rank(
    model: Model,
    axes: Mapping[str, int],
    composition: ParallelConfig,
    *,
    dtype: str = "float32",
    optimizer: Optimizer | None = None,
    cache: PassCache | None = None,
) -> list[tuple[tuple[str, int], ...]]:
    """Pairs of a class (of CLASSES, and FROZEN if there are any) and bytes, for every rank of a mesh with these
    axes, in order.

    ``optimizer`` by default is AdamW. "largest groups" are the parameter groups that are unsharded at the worst
    moment of a step. Activations are not counted. A ``cache`` speeds up the next call for the same model and axes.
    Raises UsageError for an impossible composition, such as fewer layers than stages.
    """
    optimizer = optimizer or AdamW()
    frozen = any(buffer.frozen for _, (buffer, _) in model.buffers())
    zero, itemsize = composition.storage.stage(axes), dtype_of(dtype).itemsize
    counts = elements_per_rank(model, axes, composition, itemsize)
    unsharded_bytes = [0] * len(counts)
    if zero >= 2:
        unsharded_bytes = _peak_unsharded_bytes(model, axes, composition, dtype, cache)
    ranks = []
    for (whole, owned, of_frozen), unsharded in zip(counts, unsharded_bytes, strict=True):
        parameters, gradients, state = bytes_held(whole, owned, zero, dtype_of(dtype))
        held = parameters, gradients, len(optimizer.kinds) * state, unsharded
        of_frozen_weights = ((FROZEN, of_frozen * itemsize),) if frozen else ()
        ranks.append((*zip(CLASSES, held, strict=True), *of_frozen_weights))
    return ranks


def elements_per_rank(
    model: Model, axes: Mapping[str, int], composition: ParallelConfig, itemsize: int = 4
) -> list[tuple[int, int, int]]:
    """Of every rank of a mesh with these axes, in order: the elements of all parameters of its blocks, of those that it
    owns under ZeRO, and of frozen weights. Raises UsageError for an impossible composition.
    """
    places = all_positions(dict(axes))
    layout = composed_layout(model, places[0], composition)
    frozen = [buffer for _, (buffer, _) in model.buffers() if buffer.frozen]
    arrays = [*(parameter for _, (parameter, _) in model.parameters()), *frozen]
    letters = {letter for array in arrays for letter in array.dims.split()}
    letters |= {array.element[0] for array in arrays if array.element}
    shaping = {PIPE, *(axis for letter in letters for axis in layout.axes(letter))}
    shares: dict[tuple[int, ...], tuple[int, list[_Parts], list[_Parts], int]] = {}
    ranks = []
    for place in places:
        where = tuple(place.coordinates[axis] for axis in place.axes if axis in shaping)
        if where not in shares:  # equal for ranks that differ only in their part of the batch
            shares[where] = _share(model, place, layout, itemsize, composition)
        whole, parameters, frozen_groups, unsharded = shares[where]
        owned, owned_frozen = (
            sum(parts[place.index(axes)] for axes, parts in groups) for groups in (parameters, frozen_groups)
        )
        ranks.append((whole, owned, unsharded + owned_frozen))
    return ranks


def _share(
    model: Model, place: MeshPosition, layout: Layout, itemsize: int, composition: ParallelConfig
) -> tuple[int, list[_Parts], list[_Parts], int]:
    """Elements on the ranks that hold the same blocks as this one: of all parameters, of each group of parameters and
    of sharded frozen weights, by part, and of frozen weights that are in no group."""
    assignment = composed_assignment(model, place, layout, itemsize, composition)

    def parts_of(group: ParameterGroup) -> _Parts:
        over = group.summed.cut
        return over, [part.stop - part.start for part in group.intervals(place.axis_size(over))]

    sharded_names = {name for group in assignment.frozen for name in group.spans}
    unsharded = 0
    for number in assignment.held:
        layer_name, layer = model.layers[number]
        for buffer_name, buffer in layer.buffers.items():
            home = assignment.homes.get(name := f"{layer_name}/{buffer_name}")
            if buffer.frozen and name not in sharded_names and (home is None or home.has(place)):
                unsharded += prod(layout.spec(buffer.dims).local_shape(buffer.whole(layer.sizes), place))
    parameter_size = sum(group.size for group in assignment.groups)
    groups, frozen = ([parts_of(group) for group in groups] for groups in (assignment.groups, assignment.frozen))
    return parameter_size, groups, frozen, unsharded


def _peak_unsharded_bytes(
    model: Model, axes: Mapping[str, int], composition: ParallelConfig, dtype: str, cache: PassCache | None
) -> list[int]:
    """The most bytes of unsharded groups at one time in a step, on each rank.

    These bytes do not depend on the batch, which here has a sample for each rank in each micro-batch, and two
    micro-batches for each stage: gradients of one may be under way while the next one begins.
    """
    micro_batches = 2 * axes.get(PIPE, 1)
    batch_size = micro_batches * prod(axes.values())
    analysis = analyze(
        model, axes, composition, batch_size=batch_size, micro_batches=micro_batches, dtype=dtype, cache=cache
    )
    ranks = [0] * analysis.ranks
    for rank_class in analysis:
        most = max(sum(moment.bytes_by_kind.get(kind, 0) for kind in _UNSHARDED) for moment in rank_class.step.timeline)
        for rank in rank_class.ranks:
            ranks[rank] = most
    return ranks
