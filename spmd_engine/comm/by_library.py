"""Collectives whose data the MPI library moves, which is faster with arrays of medium size.

All ranks have met before and agreed on the call, so nobody waits inside MPI for one that may not come. What is
reduced is reduced here, in rank order, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

import numpy as np

from spmd_engine.comm.shared import Reducer
from spmd_engine.comm.spans import joined, span, spans

#: Bytes of the array handed in up to which the library is faster than reading where the data lie.
MOST = {"all_gather": 1 << 22, "all_to_all": 1 << 23, "reduce_scatter": 1 << 21, "all_reduce": 1 << 21}


class Library(Protocol):
    """What is asked of it: calls that block, with contiguous arrays, and sizes in bytes of each rank's part."""

    def all_gather(self, own: np.ndarray | None, out: np.ndarray, sizes: Sequence[int]) -> None:
        """Fill ``out`` with everyone's ``own``, which lies apart; None, and then on all ranks: it is there already."""

    def all_to_all(
        self, x: np.ndarray, sizes: Sequence[int], out: np.ndarray, out_sizes: Sequence[int], even: bool
    ) -> None:
        """Send part r of ``x`` to rank r, and fill part r of ``out`` with what comes from there.

        ``even``: whether the parts of all ranks are equally long, as all of them know: one rank's may be by chance.
        """


def all_gather(
    library: Library, own: np.ndarray, shapes: Sequence[Sequence[int]], axis: int, out: np.ndarray | None
) -> np.ndarray:
    """Everyone's ``own``, of these ``shapes``, joined along ``axis``."""
    if out is not None and np.may_share_memory(own, out):  # on this rank; MPI wants to know of all
        own = own.copy()
    return _joined(shapes, axis, own.dtype, out, lambda space, sizes: library.all_gather(own, space, sizes))


def all_to_all(
    library: Library,
    own: np.ndarray,
    parts: Sequence[tuple[slice, ...]],
    shapes: Sequence[Sequence[int]],
    concat_axis: int,
    same: bool,
) -> np.ndarray:
    """What comes for the ``parts`` of ``own``: arrays of these ``shapes``, joined along ``concat_axis``.

    ``same``: whether all ranks cut arrays of the same shape into the same parts.
    """
    sent, sizes = _one_after_the_other(own, parts)
    even = same and len(set(sizes)) == 1
    return _joined(
        shapes, concat_axis, own.dtype, None, lambda space, comes: library.all_to_all(sent, sizes, space, comes, even)
    )


def reduce_scatter(
    library: Library,
    own: np.ndarray,
    parts: Sequence[tuple[slice, ...]],
    shape: Sequence[int],
    reduce: Reducer,
    out: np.ndarray | None,
) -> np.ndarray:
    """This rank's part, of that ``shape``, of the reduction of everyone's ``own``."""
    sent, sizes = _one_after_the_other(own, parts)
    blocks = np.empty((len(parts), *shape), own.dtype)
    library.all_to_all(sent, sizes, blocks, [blocks[0].nbytes] * len(parts), len(set(sizes)) == 1)
    result = out if out is not None else np.empty(shape, own.dtype)
    reduce(result, list(blocks))
    return result


def all_reduce(
    library: Library, own: np.ndarray, ranks: int, rank: int, reduce: Reducer, out: np.ndarray | None
) -> np.ndarray:
    """The reduction of everyone's ``own``; ``out`` may be ``own``."""
    result = out if out is not None else np.empty_like(own)
    flat, total = own.reshape(-1), result.reshape(-1)
    parts = [span(flat.size, ranks, r) for r in range(ranks)]
    part = total[parts[rank]]
    reduce_scatter(library, flat, [(each,) for each in parts], part.shape, reduce, part)
    library.all_gather(None, total, [(each.stop - each.start) * own.itemsize for each in parts])
    return result


def _one_after_the_other(x: np.ndarray, parts: Sequence[tuple[slice, ...]]) -> tuple[np.ndarray, list[int]]:
    """The ``parts`` of ``x`` in one piece of memory, and the bytes of each."""
    views = [x[part] for part in parts]
    sizes = [view.nbytes for view in views]
    if len(parts[0]) == 1:  # cut along the first axis, they are that already
        return x, sizes
    return joined([view.reshape(-1) for view in views], 0, x.dtype), sizes


def _joined(
    shapes: Sequence[Sequence[int]],
    axis: int,
    dtype: np.dtype,
    out: np.ndarray | None,
    receive: Callable[[np.ndarray, Sequence[int]], None],
) -> np.ndarray:
    """What ``receive(space, sizes)`` writes to ``space``, arrays of these ``shapes``, joined along ``axis``."""
    counts, lengths = [prod(shape) for shape in shapes], [shape[axis] for shape in shapes]
    sizes = [count * dtype.itemsize for count in counts]
    if out is None:
        out = np.empty((*shapes[0][:axis], sum(lengths), *shapes[0][axis + 1 :]), dtype)
    if axis == 0:
        receive(out, sizes)
        return out
    space = np.empty(out.size, dtype)
    receive(space, sizes)
    for shape, elements, place in zip(shapes, spans(counts), spans(lengths), strict=True):
        out[(slice(None),) * axis + (place,)] = space[elements].reshape(shape)
    return out
