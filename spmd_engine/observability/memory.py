"""Bytes that each rank of a mesh stores, by kind, under the stages of ZeRO."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from spmd_engine.arrays.precision import dtype_of
from spmd_engine.axes import MeshPosition, all_positions
from spmd_engine.engine import ParallelConfig
from spmd_engine.engine.build import composed_assignment, composed_layout
from spmd_engine.engine.optimizers import AdamW, Optimizer
from spmd_engine.engine.state.array_table import BUFFER, FROZEN, GRADIENT, RESIDUE, STATE, ArrayRow
from spmd_engine.engine.state.assignment import PIPE
from spmd_engine.models import Model
from spmd_engine.pictures import BLUE, GREEN, ORANGE, PURPLE, SKY, Cell, Picture, listed, table, text
from spmd_engine.planning import analyze
from spmd_engine.planning.dry_run.engine import PassCache
from spmd_engine.sharding import Layout
from spmd_engine.sharding.groups import ParameterGroup
from spmd_engine.training import TrainConfig
from spmd_engine.training.workload import optimizer_of
from spmd_engine.units import readable_bytes

CLASSES = ("parameters", "gradients", "optimizer state", "largest groups")
FROZEN_WEIGHTS = "frozen weights"  #: one more class, of models with adapters
FILLS = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer state": GREEN,
    "largest groups": PURPLE,
    FROZEN_WEIGHTS: SKY,
}
LONGEST_BAR = 72  # columns
MOST_BARS = 12

Held = tuple[tuple[str, int], ...]  # classes with their bytes


def draw_memory(job: TrainConfig, model: Model, composition: ParallelConfig) -> Picture:
    """Bytes of ranks on the mesh of the ``composition``: with a ZeRO stage, a bar for each group of equal ranks, and
    without one, a bar for each stage, of the rank that holds most."""
    axes, stage = dict(composition.mesh or {}), composition.storage.stage(composition.mesh or {})
    side_by_side = composition.zero is None and not composition.assigned
    options = {"dtype": job.model.dtype, "optimizer": optimizer_of(job.training), "cache": PassCache()}
    held = {
        zero: bytes_per_rank(model, axes, composition.in_memory.changed(zero=zero), **options)
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


def draw_storage(job: TrainConfig, model: Model, composition: ParallelConfig) -> Picture:
    """The table of the kinds of arrays in this composition, with the bytes of each, without a drawing."""
    axes, dtype = dict(composition.mesh or {}), dtype_of(job.model.dtype)
    first, states = all_positions(axes)[0], len(optimizer_of(job.training).kinds)
    assignment = composed_assignment(
        model, first, composed_layout(model, first, composition), dtype.itemsize, composition
    )
    sharded_axes = dict.fromkeys(axis for group in assignment.groups for axis in group.summed.sharded)
    ranks = elements_per_rank(model, axes, composition, dtype.itemsize)
    rows: list[tuple[str, ...]] = [("array", "on a rank", "dtype", "place", "bytes on rank 0", "on the rank with most")]
    for row in composition.storage.table(axes, tuple(sharded_axes), dtype).values():
        held = [0 if row.kind == RESIDUE else _bytes_of(row, elements, states) for elements in ranks]
        if row.kind in (FROZEN, BUFFER) and not any(held):
            continue
        part = f"a part, over {','.join(row.axes)}" if row.axes else "the whole"
        where = f"memory of the {row.alias}" if row.alias else row.place if row.lasts else f"{row.place}, while used"
        kind = f"{row.kind} ({states} kinds)" if row.kind == STATE else row.kind
        numbers = (f"{held[0]:,}", f"{max(held):,}") if any(held) else ("", "")
        rows.append((kind, part, str(row.dtype), where, *numbers))
    stage, count = composition.storage.stage(axes), f"{model.parameter_count:,}"
    title = f"{job.model.name}, {count} parameters in {dtype}, {job.training.optimizer}, mesh {first}, zero {stage}"
    notes = [
        "Bytes between steps, of what has memory of its own; 'analyze' counts what is there while it is used.",
        "Where nothing is trained (generate, eval, infer) there is neither master, gradient nor optimizer state.",
    ]
    return Picture(f"{title}: where arrays live", [], table(rows, "llllrr"), notes)


def _bytes_of(row: ArrayRow, elements: Elements, states: int) -> int:
    """Bytes of all arrays of a kind on a rank."""
    if row.kind in (FROZEN, BUFFER):
        return (elements.frozen if row.kind == FROZEN else elements.buffers) * row.dtype.itemsize
    return row.nbytes(elements.whole, elements.owned) * (states if row.kind == STATE else 1)


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


def bytes_per_rank(
    model: Model,
    axes: Mapping[str, int],
    composition: ParallelConfig,
    *,
    dtype: str = "float32",
    optimizer: Optimizer | None = None,
    cache: PassCache | None = None,
) -> list[tuple[tuple[str, int], ...]]:
    """Pairs of a class (of CLASSES, and FROZEN_WEIGHTS if there are any) and bytes, for every rank of a mesh with these
    axes, in order.

    ``optimizer`` by default is AdamW. "largest groups" are the parameter groups that are unsharded at the worst
    moment of a step. Activations are not counted. A ``cache`` speeds up the next call for the same model and axes.
    Raises UsageError for an impossible composition, such as fewer layers than stages.
    """
    optimizer = optimizer or AdamW()
    frozen = any(buffer.frozen for _, (buffer, _) in model.buffers())
    itemsize = dtype_of(dtype).itemsize
    counts = elements_per_rank(model, axes, composition, itemsize)
    # The parts of parameters that no axis shards are whole.
    rows = composition.storage.table(axes, tuple(axes), dtype_of(dtype))
    unsharded_bytes = [0] * len(counts)
    if not rows[GRADIENT].lasts:
        unsharded_bytes = _peak_unsharded_bytes(model, axes, composition, dtype, cache)
    ranks = []
    for count, unsharded in zip(counts, unsharded_bytes, strict=True):
        held = *rows.bytes_by_class(count.whole, count.owned, len(optimizer.kinds)).values(), unsharded
        of_frozen_weights = ((FROZEN_WEIGHTS, count.frozen * itemsize),) if frozen else ()
        ranks.append((*zip(CLASSES, held, strict=True), *of_frozen_weights))
    return ranks


class Elements(NamedTuple):
    """Numbers of elements on a rank."""

    whole: int  #: all parameters of its blocks
    owned: int  #: those that it updates, under ZeRO
    frozen: int  #: frozen weights
    buffers: int  #: other buffers


def elements_per_rank(
    model: Model, axes: Mapping[str, int], composition: ParallelConfig, itemsize: int = 4
) -> list[Elements]:
    """Those of every rank of a mesh with these axes, in order. Raises UsageError for an impossible composition."""
    places = all_positions(dict(axes))
    layout = composed_layout(model, places[0], composition)
    frozen = [buffer for _, (buffer, _) in model.buffers() if buffer.frozen]
    arrays = [*(parameter for _, (parameter, _) in model.parameters()), *frozen]
    letters = {letter for array in arrays for letter in array.dims.split()}
    letters |= {array.element[0] for array in arrays if array.element}
    shaping = {PIPE, *(axis for letter in letters for axis in layout.axes(letter))}
    counts: dict[tuple[int, ...], Callable[[MeshPosition], Elements]] = {}
    ranks = []
    for place in places:
        where = tuple(place.coordinates[axis] for axis in place.axes if axis in shaping)
        if where not in counts:  # equal for ranks that differ only in their part of the batch
            counts[where] = _counting(model, place, layout, itemsize, composition)
        ranks.append(counts[where](place))
    return ranks


def _counting(
    model: Model, place: MeshPosition, layout: Layout, itemsize: int, composition: ParallelConfig
) -> Callable[[MeshPosition], Elements]:
    """The function that counts the elements on a rank that holds the same blocks as the one at ``place``."""
    assignment = composed_assignment(model, place, layout, itemsize, composition)

    def parts_of(group: ParameterGroup) -> tuple[tuple[str, ...], list[int]]:
        """The axes that shard the storage of a group, and the size of each part."""
        over = group.summed.sharded
        return over, [part.stop - part.start for part in group.intervals(place.axis_size(over))]

    sharded_names = {name for group in assignment.frozen for name in group.spans}
    unsharded = buffers = 0
    for number in assignment.held:
        layer_name, layer = model.layers[number]
        for buffer_name, buffer in layer.buffers.items():
            home = assignment.homes.get(name := f"{layer_name}/{buffer_name}")
            if name in sharded_names or not (home is None or home.has(place)):
                continue
            size = prod(layout.spec(buffer.dims).local_shape(buffer.whole(layer.sizes), place))
            unsharded, buffers = unsharded + size * buffer.frozen, buffers + size * (not buffer.frozen)
    parameter_size = sum(group.size for group in assignment.groups)
    all_parts = [[parts_of(group) for group in groups] for groups in (assignment.groups, assignment.frozen)]

    def count(rank: MeshPosition) -> Elements:
        owned, frozen = (sum(parts[rank.index(axes)] for axes, parts in groups) for groups in all_parts)
        return Elements(parameter_size, owned, unsharded + frozen, buffers)

    return count


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
    for rank_class in analysis.classes:
        most = max(sum(moment.bytes_by_kind.get(kind, 0) for kind in _UNSHARDED) for moment in rank_class.step.timeline)
        for rank in rank_class.ranks:
            ranks[rank] = most
    return ranks
