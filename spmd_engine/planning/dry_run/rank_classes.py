"""Classes of ranks whose steps are equal except for their coordinates: a dry run executes one rank of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from spmd_engine.axes import PIPE, MeshPosition, all_positions
from spmd_engine.comm.notation import Weights, nested_span
from spmd_engine.comm.shared_memory.arena import MOST_RANKS
from spmd_engine.comm.shared_memory.slot_table import size_of_table
from spmd_engine.layers import Layer
from spmd_engine.layers.contract import is_checked
from spmd_engine.models import Model
from spmd_engine.planning.dry_run.step_analysis import GroupKey, StepAnalysis
from spmd_engine.sharding import Layout
from spmd_engine.sharding.groups import ParameterGroup

#: The axes over which parameters are stored in shards, and the lengths of these shards.
UnevenParts = tuple[Sequence[str], Sequence[int]]
#: Letters whose shards differ even where their sizes are equal: by position, by neighbours, or by content.
POSITIONAL = "sehwn"


def find_rank_classes(
    model: Model,
    layout: Layout,
    axes: Mapping[str, int],
    samples: Iterable[int],
    uneven: Iterable[UnevenParts] = (),
    sequence: int | None = None,
) -> np.ndarray:
    """The class of each rank, int[axes]: ranks along an axis are in one class if all their blocks have equal sizes.

    ``samples`` are the sizes of micro-batches; ``sequence`` is the length of samples (None: the model's context). The
    class of a rank does not depend on which shard it stores, except for ``uneven`` parts, which several stages, or
    replicas of a shard, sum.
    """
    images = {"h", "w"} <= set(model.inputs.split())
    lengths: dict[str, set[int]] = {"b": set(samples), "s": {sequence or model.context or 1}}
    for _, layer in model.layers:
        for letter, size in layer.sizes.items():
            lengths.setdefault(letter, set()).add(size)
    distinct = {"pipe"}
    # channels of images may also be sent between ranks, by a transfer plan in which no rank sends to itself
    letters = {*POSITIONAL, *layout.inside, *layout.residual} - {"b"} if images else set(POSITIONAL) - {"h"}
    batch = layout.axes("b")
    # a layer of the user may read halos on the residual stream, too; those of this package do not
    own = any(is_checked(type(part)) for _, layer in model.layers for part in _layers_in(layer))
    for letter, where in product(letters, ("inside", "residual")[: 1 + own]):
        over = layout.axes(letter, where)
        # samples that are sharded further than the batch are sent between ranks with the same part of the batch
        distinct.update(over[len(batch) :] if images and letter == "n" and over[: len(batch)] == batch else over)
    numbers = []
    for axis, size in axes.items():
        if axis in distinct:
            numbers.append(list(range(size)))
            continue
        rows = [
            _lengths_along(axis, over, length, axes, layout.weights(letter, where))
            for where in ("inside", "residual")
            for letter, sizes in lengths.items()
            if axis in (over := layout.axes(letter, where))
            for length in sorted(sizes)
        ]
        rows += [_uneven_along(axis, over, parts, axes) for over, parts in uneven if axis in over]
        unique: dict[tuple, int] = {}
        numbers.append([unique.setdefault(tuple(row[index] for row in rows), len(unique)) for index in range(size)])
    counts = [max(row) + 1 for row in numbers]
    return np.ravel_multi_index(np.ix_(*numbers), counts)


def _layers_in(value: Any) -> Iterator[Layer]:
    """A layer and all layers inside it."""
    if isinstance(value, Layer):
        yield value
        value = tuple(vars(value).values())
    for part in value if isinstance(value, (list, tuple)) else ():
        yield from _layers_in(part)


def _lengths_along(
    axis: str, over: Sequence[str], length: int, axes: Mapping[str, int], weights: Weights
) -> list[tuple[int, ...]]:
    """For each index along an axis, the lengths of its shards of a letter that is sharded over ``over``."""
    others = [other for other in over if other != axis]
    lengths = []
    for index in range(axes[axis]):
        shards = []
        for coordinates in product(*(range(axes[other]) for other in others)):
            position = dict(zip(others, coordinates, strict=True)) | {axis: index}
            shard = nested_span(length, tuple(over), axes, position, weights)
            shards.append(shard.stop - shard.start)
        lengths.append(tuple(shards))
    return lengths


def uneven_parts(groups: Iterable[ParameterGroup], axes: Mapping[str, int]) -> list[UnevenParts]:
    """The uneven stored shards of parameter groups whose gradients are summed shard by shard: with other stages, or
    along axes that do not shard them."""
    parts: list[UnevenParts] = []
    for group in groups:
        summed, over = group.summed, group.summed.sharded
        if not summed.stages and not any(axes[axis] > 1 for axis in summed.over if axis not in over):
            continue
        lengths = tuple(part.stop - part.start for part in group.intervals(prod(axes[axis] for axis in over)))
        if len(set(lengths)) > 1:
            parts.append((over, lengths))
    return parts


def _uneven_along(
    axis: str, over: Sequence[str], parts: Sequence[int], axes: Mapping[str, int]
) -> list[tuple[int, ...]]:
    """For each index along an axis, the lengths of its shards of a group that is stored over the axes ``over``."""
    by_index = np.moveaxis(np.reshape(parts, [axes[name] for name in over]), over.index(axis), 0)
    return [tuple(row.reshape(-1).tolist()) for row in by_index]


def ranks_by_class(classes: np.ndarray) -> dict[int, list[int]]:
    """The ranks of each class, by the number of the class."""
    flat = classes[classes >= 0]
    order = np.argsort(flat, kind="stable")
    numbers, starts = np.unique(flat[order], return_index=True)
    return dict(zip(numbers.tolist(), (part.tolist() for part in np.split(order, starts[1:])), strict=True))


# --- Slot tables: the first rank of a group on each node holds the shared memory in which the group agrees. Its size
# --- does not change during a job, and differs between ranks that are otherwise equal


Coordinates = tuple[int, ...]  #: indices of a rank along the axes of its mesh, in order
Along = tuple[tuple[int, Coordinates], ...]  #: the axes along which a group's ranks differ, by number, and the indices


def slot_table_bytes(analysis: StepAnalysis, nodes: Sequence[str]) -> list[int]:
    """Bytes of the slot tables that each rank holds. ``nodes`` names each rank's host; a host of one rank has none."""
    coordinates = [tuple(place.coordinates.values()) for place in all_positions(analysis.axes)]
    on_node: dict[str, list[Coordinates]] = defaultdict(list)
    for position, node in zip(coordinates, nodes, strict=False):  # helper ranks come last
        on_node[node].append(position)
    sizes = [0] * analysis.ranks
    for rank_class in analysis.classes:
        groups = _distinct_groups(analysis.axes, rank_class.step.groups, rank_class.step.coordinates)
        for rank in rank_class.ranks if rank_class.step.coordinates else ():  # a helper rank has no groups
            near = on_node[nodes[rank]]
            if 1 < len(near) <= MOST_RANKS:
                sizes[rank] = sum(_table_bytes(coordinates[rank], along, near) for along in groups)
    return sizes


def _distinct_groups(axes: Mapping[str, int], keys: Sequence[GroupKey], at: Mapping[str, int]) -> set[Along]:
    """The groups that a rank is in, including the world; keys with the same members are one group."""
    groups = set()
    for names, places in [(tuple(axes), ()), *keys]:
        sizes = axes if PIPE in names else MeshPosition(axes, at).axes
        indices = {axis: dict(places).get(axis, tuple(range(sizes[axis]))) for axis in names}
        groups.add(tuple((list(axes).index(axis), tuple(row)) for axis, row in indices.items() if len(row) > 1))
    return groups


def _table_bytes(rank: Coordinates, along: Along, near: Sequence[Coordinates]) -> int:
    """Bytes of a group's table if this rank is the first member on its node, else 0.

    Only ranks of the node are visited: a group may have thousands of members.
    """
    places = dict(along)
    indices = [
        tuple(row.index(other[axis]) for axis, row in along)
        for other in near
        if all(index in places[axis] if axis in places else index == rank[axis] for axis, index in enumerate(other))
    ]
    return size_of_table(len(indices)) if min(indices) == tuple(row.index(rank[axis]) for axis, row in along) else 0
