"""Memory in which ranks of a node meet: each group's table lies in the arena of the first of them, all through a job.

It is the same in every step and at every moment of it, and differs between ranks that are alike in all else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product

from spmd_engine.comm.shared_memory.node import MOST_RANKS
from spmd_engine.comm.shared_memory.slot_table import size_of_table
from spmd_engine.planning.dry_run.step_analysis import GroupKey, StepAnalysis

Coordinates = tuple[int, ...]  #: of a rank, along the axes of its mesh in their order
Along = tuple[tuple[int, Coordinates], ...]  #: the axes along which a group's ranks differ, by number, and the places


def tables_of(analysis: StepAnalysis, nodes: Sequence[str]) -> list[int]:
    """Bytes of the tables in each rank's arena, ``nodes`` naming each rank's host. Hosts of one rank have none."""
    coordinates = list(product(*map(range, analysis.axes.values())))
    on_node: dict[str, list[Coordinates]] = defaultdict(list)
    for where, node in zip(coordinates, nodes, strict=True):
        on_node[node].append(where)
    found = [0] * analysis.ranks
    for alike in analysis:
        groups = _groups(analysis.axes, alike.step.groups)
        for rank in alike.ranks:
            near = on_node[nodes[rank]]
            if 1 < len(near) <= MOST_RANKS:
                found[rank] = sum(_first_of(coordinates[rank], along, near) for along in groups)
    return found


def _groups(axes: Mapping[str, int], keys: Sequence[GroupKey]) -> set[Along]:
    """Along which axes ranks are in groups, each with a table; of all ranks there is one. Keys that leave a rank the
    same others, in the same order, are those of one group."""
    found = set()
    for names, places in [(tuple(axes), ()), *keys]:
        left = {axis: dict(places).get(axis, tuple(range(axes[axis]))) for axis in names}
        found.add(tuple((list(axes).index(axis), tuple(each)) for axis, each in left.items() if len(each) > 1))
    return found


def _first_of(own: Coordinates, along: Along, near: Sequence[Coordinates]) -> int:
    """Bytes of a group's table, if this rank is the first of its members on the node. Only these are looked at: a group
    may have thousands."""
    places = dict(along)
    here = [
        tuple(each.index(other[axis]) for axis, each in along)
        for other in near
        if all(place in places[axis] if axis in places else place == own[axis] for axis, place in enumerate(other))
    ]
    return size_of_table(len(here)) if min(here) == tuple(each.index(own[axis]) for axis, each in along) else 0
