"""Products of few rows and a large matrix: a step of a generation for some sequences at once.

BLAS copies the matrix into an order of its own before it multiplies. With few rows that, and not the multiplication, is
the work; done for a part that stays in the cache, the copy costs little: two to three times faster at 2 to 16 rows.
"""

from __future__ import annotations

from spmd_engine.arrays.backend import CPU, Array

MOST_ROWS = 32
PART_BYTES = 300_000  # of the matrix at a time: with its copy, less than a core's second cache
LEAST_BYTES = 1_000_000  # of a matrix that is worth it


def are_few(rows: int) -> bool:
    """Whether a product of so many rows may be worth it, if the other matrix is large: of one, BLAS copies nothing."""
    return 1 < rows <= MOST_ROWS


def product(a: Array, b: Array) -> Array:
    """a[m k] · b[k n], of arrays of any backend, whichever of the two is the large one."""
    if type(a) is CPU.xp.ndarray and a.ndim == b.ndim == 2 and a.dtype == b.dtype:
        if _is_worth_it(a, b):
            return _by_parts(a, b)
        if _is_worth_it(b.T, a.T):
            return _by_parts(b.T, a.T).T
    return a @ b


def _is_worth_it(few: Array, large: Array) -> bool:
    in_order = large.flags.c_contiguous or large.flags.f_contiguous
    return are_few(len(few)) and large.nbytes >= LEAST_BYTES and in_order


def _by_parts(few: Array, large: Array) -> Array:
    """few[m k] · large[k n], by rows of ``large`` as it lies in memory."""
    if not large.flags.c_contiguous:
        y = CPU.xp.empty((len(few), large.shape[1]), few.dtype)
        for part in _parts(large.T):
            CPU.xp.matmul(few, large[:, part], out=y[:, part])
        return y
    y = None
    for part in _parts(large):
        more = few[:, part] @ large[part]
        y = more if y is None else CPU.xp.add(y, more, out=y)
    return y


def _parts(rows: Array) -> list[slice]:
    step = max(8, PART_BYTES // rows[0].nbytes)
    return [slice(begin, begin + step) for begin in range(0, len(rows), step)]
