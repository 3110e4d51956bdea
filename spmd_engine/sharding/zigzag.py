"""Blocks of whole arrays where a layout cuts a letter in a zigzag, and the whole in order again."""

from __future__ import annotations

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.axes import MeshPosition
from spmd_engine.sharding.layout import Layout


def block_of(x: Array, dims: str, layout: Layout, mesh: MeshPosition, first: int = 0) -> Array:
    """This rank's block of the whole ``x[dims]``, as it is inside layers; dims before number ``first`` are left."""
    for dim, letter in enumerate(dims.split()):
        axes = layout.axes(letter)
        if dim < first or not axes:
            continue
        mine = layout.positions_by_rank(x.shape[dim], mesh, letter)[mesh.index(axes)]
        x = backend_of(x).xp.take(x, mine, axis=dim)
    return x


def in_order(x: Array, dims: str, layout: Layout, mesh: MeshPosition) -> Array:
    """The whole ``x[dims]`` in order, from blocks that were joined rank by rank."""
    for dim, letter in enumerate(dims.split()):
        if letter in layout.zigzag and layout.axes(letter):
            places = np.argsort(np.concatenate(layout.positions_by_rank(x.shape[dim], mesh, letter)))
            x = backend_of(x).xp.take(x, places, axis=dim)
    return x
