"""Placements that no rank can tell alone: every rank says what it holds, of all arrays at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from spmd_engine.arrays.dtypes import describe, described
from spmd_engine.axes import MeshPosition
from spmd_engine.comm.agreement import gather_json
from spmd_engine.comm.group import Group
from spmd_engine.sharding.notation import Spec
from spmd_engine.sharding.placement import ArrayPlacement, Placement
from spmd_engine.sharding.rectangles import Rectangle


def ask_placement(
    group: Group, held: Mapping[str, tuple[np.dtype, Rectangle]], *, label: str = "placement"
) -> Placement:
    """The placement of arrays of which this rank holds one rectangle each, or none: those it does not name.

    One all_gather. An array is as large as the rectangles reach; whether they cover it, ``check`` and
    ``plan_transfer`` tell. The first who holds an element owns it.
    """
    return placement_said(gather_json(group, say(held), label))


def say(held: Mapping[str, tuple[np.dtype, Rectangle]]) -> dict[str, Any]:
    """What a rank says, in JSON, of the rectangles that it holds: each once, and of each array, which of them."""
    kinds: dict[tuple[np.dtype, Rectangle], int] = {}
    numbers = {name: kinds.setdefault(each, len(kinds)) for name, each in held.items()}
    return {"kinds": [(describe(dtype), part.start, part.stop) for dtype, part in kinds], "arrays": numbers}


def placement_said(everyone: Sequence[Mapping[str, Any]]) -> Placement:
    """The placement by what each rank said; arrays of which all said the same have one and the same."""
    kinds = [[_hashable(each) for each in said["kinds"]] + [None] for said in everyone]
    found: dict[tuple[int, ...], ArrayPlacement] = {}
    arrays = {}
    for name in dict.fromkeys(name for said in everyone for name in said["arrays"]):
        numbers = tuple(said["arrays"].get(name, -1) for said in everyone)
        if numbers not in found:
            found[numbers] = _placed(tuple(of_rank[n] for of_rank, n in zip(kinds, numbers, strict=True)))
        arrays[name] = found[numbers]
    return Placement(arrays)


def ask_shapes(
    group: Group, place: MeshPosition, blocks: Mapping[str, tuple[Spec, Sequence[int]]], *, label: str = "shape"
) -> dict[str, tuple[int, ...]]:
    """The whole shapes of arrays cut over a mesh, from the shapes of everyone's blocks. One all_gather.

    ``group`` is all of the mesh, at ``place`` on it this rank. Of arrays that not all of those have along whose axes
    they are cut, nothing is said.
    """
    everyone = gather_json(group, {name: tuple(shape) for name, (_, shape) in blocks.items()}, label)
    shapes = {}
    for name, (spec, shape) in blocks.items():
        along = [[everyone[peer.index(None)].get(name) for peer in place.peers(axes)] for _, axes in spec]
        if all(len(said or ()) == len(shape) for found in along for said in found):
            shapes[name] = tuple(sum(said[dim] for said in found) for dim, found in enumerate(along))
    return shapes


_Said = tuple[str, tuple[int, ...], tuple[int, ...]]  # a dtype, start and stop


def _hashable(said: Sequence) -> _Said:
    return said[0], tuple(said[1]), tuple(said[2])


@lru_cache(maxsize=256)
def _placed(said: tuple[_Said | None, ...]) -> ArrayPlacement:
    """By what each rank said; of layers of a kind, all say the same."""
    held = [() if each is None else (Rectangle(each[1], each[2]),) for each in said]
    stops = [part.stop for parts in held for part in parts]
    dtype = next(each[0] for each in said if each is not None)
    return ArrayPlacement.of_rectangles(tuple(map(max, zip(*stops, strict=True))), described(dtype), held)
