"""Adding rows to a table at indices, which may repeat: the adjoint of indexing; and counting indices."""

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.fused import kernels_for
from spmd_engine.arrays.precision import widened


def add_rows(table: Array, indices: Array, rows: Array) -> None:
    """``table[indices[n]] += rows[n d]``, in an order that depends on the indices alone; on a device, indices of -1 are
    left out.

    Sorting first makes each table row one sum, which is far faster than ``numpy.add.at`` and, unlike atomic
    additions on a device, the same every time. (Of floats without kernels, a device adds atomically.)
    """
    if indices.size == 0:
        return
    xp = backend_of(table).xp
    if backend_of(table).on_device:
        if kernels := kernels_for(table):
            kernels.add_rows(table, indices, rows)
        else:
            xp.add.at(table, indices, xp.where(indices[:, None] < 0, rows.dtype.type(0), rows))
        return
    order = xp.argsort(indices, kind="stable")
    ordered = indices[order]
    first = xp.concatenate([xp.ones(1, bool), ordered[1:] != ordered[:-1]])
    starts = xp.flatnonzero(first)
    table[ordered[starts]] += xp.add.reduceat(widened(rows[order]), starts, axis=0)


def count_each(indices: Array, size: int) -> Array:
    """int64[size]: how often each number below ``size`` is among indices[n]."""
    xp = backend_of(indices).xp
    if backend_of(indices).on_device:  # CuPy's bincount waits for the device
        return backend_of(indices).kernels.count_each(indices, size)
    return xp.bincount(indices, minlength=size)
