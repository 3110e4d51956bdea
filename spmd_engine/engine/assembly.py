"""A whole array out of the rectangles that ranks hold of it, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.errors import MismatchError, UsageError

if TYPE_CHECKING:
    from spmd_engine.engine.holdings import Holdings, Index

_MOST_DIMS = 8


def assemble(
    engine: Holdings, name: str, part: Array | None, index: Callable[[str], Index | None], root: int | None = None
) -> Array | None:
    """The whole of which this rank holds ``part`` at ``index(name)`` (None: nothing), on every rank or on ``root``.

    Of several ranks that hold the same rectangle, the first sends it. Collective over the world. Raises
    UsageError if nobody holds some of it, MismatchError if ranks ask for different names.
    """
    if name not in engine.names and name not in engine.buffer_names:
        raise UsageError(f"no parameter {name!r}; there are: {', '.join((*engine.names, *engine.buffer_names))}")
    world = engine.group()
    # Over the world, and before anything else, so that any rank's mistake meets the others.
    asked = world.all_gather(np.array([crc32(name.encode())], np.uint32), label="gather")
    if (asked != asked[world.rank]).any():
        others = np.flatnonzero(asked != asked[0]).tolist()
        raise MismatchError(f"gather: ranks {others} ask for another parameter than rank 0 (here: {name!r})")
    here = index(name)
    said = np.full((1, 1 + 2 * _MOST_DIMS), -1, np.int64)
    if here is not None:
        bounds = [n for place in here for n in (place.start, place.stop)]
        said[0, : 1 + len(bounds)] = len(here), *bounds
    said = world.all_gather(said, label="gather")
    dims = int(said[:, 0].max())
    if dims < 0:
        raise UsageError(f"no rank holds any of {name!r}")
    rectangles: dict[int, Index] = {}  # by the rank that gives them
    for rank, row in enumerate(said):
        bounds = row[1 : 1 + 2 * dims].reshape(dims, 2).tolist()
        rectangle = tuple(slice(*pair) for pair in bounds)
        if row[0] >= 0 and rectangle not in rectangles.values() and prod(stop - start for start, stop in bounds):
            rectangles[rank] = rectangle
    shape = said[:, 2 : 2 + 2 * dims : 2].max(axis=0).tolist()
    mine = part if world.rank in rectangles else None
    pieces = _everywhere(engine, mine, list(rectangles)) if root is None else _at(engine, mine, list(rectangles), root)
    if pieces is None:
        return None
    xp = engine.backend.xp
    dtype = next((p.dtype for p in (*pieces.values(), part) if p is not None), np.dtype(np.float32))
    whole = xp.empty(shape, dtype)
    filled = 0
    for rank, rectangle in rectangles.items():
        block = whole[(..., *rectangle)]  # a view, also of a number
        block[...] = pieces[rank].reshape(block.shape)
        filled += block.size
    if filled < whole.size:
        raise UsageError(f"{name}: ranks hold {filled} of its {whole.size} elements; is its sharding right?")
    return whole


def _everywhere(engine: Holdings, mine: Array | None, givers: list[int]) -> dict[int, Array]:
    """Everyone's flat pieces, by rank."""
    world = engine.group()
    if givers == [world.rank] and world.size == 1:
        return {world.rank: mine}
    mine_from = {rank: mine if rank == world.rank else None for rank in givers}
    pieces = {rank: world.start_broadcast(piece, rank, label="gather") for rank, piece in mine_from.items()}
    return {rank: engine.backend.asarray(pending.wait()) for rank, pending in pieces.items()}


def _at(engine: Holdings, mine: Array | None, givers: list[int], root: int) -> dict[int, Array] | None:
    """Everyone's pieces on ``root``, one sender after the other; None elsewhere."""
    world = engine.group()
    if world.rank != root:
        if mine is not None:
            world.send(root, mine, label="gather")
        return None
    return {
        rank: mine if rank == root else world.receive(rank, like=engine.backend, label="gather") for rank in givers
    }
