"""Adding rows to a table at indices, which may repeat: the adjoint of indexing; and counting indices."""

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import widened


def add_rows(table: Array, indices: Array, rows: Array) -> None:
    """``table[indices[n]] += rows[n d]``, in an order that depends on the indices alone.

    Sorting first makes each table row one sum, which is far faster than ``numpy.add.at`` and, unlike atomic
    additions on a device, the same every time.
    """
    if indices.size == 0:
        return
    xp = backend_of(table).xp
    order = xp.argsort(indices, kind="stable")
    ordered = indices[order]
    first = xp.concatenate([xp.ones(1, bool), ordered[1:] != ordered[:-1]])
    starts = xp.flatnonzero(first)
    if xp.__name__ == "numpy":
        table[ordered[starts]] += xp.add.reduceat(widened(rows[order]), starts, axis=0)
    else:  # CuPy has no reduceat: differences of running sums, in float64 to keep all digits
        running = xp.cumsum(rows[order].astype(xp.float64), axis=0)
        ends = running[xp.concatenate([starts[1:], xp.asarray([indices.size])]) - 1]
        ends[1:] -= ends[:-1].copy()
        table[ordered[starts]] += ends.astype(table.dtype)


def count_each(indices: Array, size: int) -> Array:
    """int64[size]: how often each number below ``size`` is among indices[n]."""
    xp = backend_of(indices).xp
    if indices.size == 0:  # where CuPy's bincount raises
        return xp.zeros(size, xp.int64)
    return xp.bincount(indices, minlength=size)
