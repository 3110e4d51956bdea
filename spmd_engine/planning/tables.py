"""Memory in which ranks of a node meet: each group's table lies in the arena of the first of them, all through a job.

It is the same in every step and at every moment of it, and differs between ranks that are alike in all else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product

from spmd_engine.comm.slot_table import size_of_table
from spmd_engine.node.node import MOST_RANKS
from spmd_engine.planning.meetings import place_of
from spmd_engine.planning.step_analysis import GroupKey, StepAnalysis


def tables_of(analysis: StepAnalysis, nodes: Sequence[str]) -> list[int]:
    """Bytes of the tables in each rank's arena, ``nodes`` naming each rank's host. Hosts of one rank have none."""
    ranks_on: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        ranks_on[node].append(rank)
    found = [0] * analysis.ranks
    for alike in analysis:
        for rank in alike.ranks:
            near = ranks_on[nodes[rank]]
            if 1 < len(near) <= MOST_RANKS:
                found[rank] = sum(
                    _first_of(rank, members, near) for members in _groups(rank, analysis, alike.step.groups)
                )
    return found


def _groups(rank: int, analysis: StepAnalysis, keys: Sequence[GroupKey]) -> set[tuple[int, ...]]:
    """The members of each group of a rank, in their order, in which they share a table; of all ranks there is one."""
    everyone = tuple(range(analysis.ranks))
    coordinates = place_of(rank, analysis.axes).coordinates
    return {everyone, *(_members(coordinates, analysis.axes, *key) for key in keys)}


def _members(
    coordinates: Mapping[str, int], axes: Mapping[str, int], names: Sequence[str], places: Sequence
) -> tuple[int, ...]:
    """The ranks that differ only along ``names``, of which ``places`` are left of some."""
    strides, stride = {}, 1
    for axis in reversed(axes):
        strides[axis] = stride
        stride *= axes[axis]
    left = dict(places)
    base = sum(place * strides[axis] for axis, place in coordinates.items() if axis not in names)
    along = ([strides[axis] * place for place in left.get(axis, range(axes[axis]))] for axis in names)
    return tuple(base + sum(parts) for parts in product(*along))


def _first_of(rank: int, members: Sequence[int], near: Sequence[int]) -> int:
    """Bytes of a group's table, if this rank is the first of its members on the node."""
    here = set(near)
    local = [member for member in members if member in here]
    return size_of_table(len(local)) if local[0] == rank else 0
