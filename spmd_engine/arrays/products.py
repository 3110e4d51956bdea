"""Matrix products of float32, float64 and bfloat16 arrays behind one function.

A product of bfloat16 operands sums in float32 and is rounded once, to nearest even, to the dtype of its result. NumPy
has no such product: it computes one of float32 copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import accumulated_in, is_half, rounded, widened


def matmul(a: Array, b: Array, out: Array | None = None, dtype: Any = None) -> Array:
    """``numpy.matmul``: y[... m n] = a[... m k] · b[... k n], of the arrays of any backend.

    ``dtype`` is that of the result, by default that of ``out``, or else of a sum of both operands. bfloat16 operands
    may have a float32 result.
    """
    if type(a) is not np.ndarray or type(b) is not np.ndarray:
        return _of_backend(a, b, out, dtype)
    if a.dtype is b.dtype and not is_half(a.dtype) and (dtype is None or dtype == a.dtype):
        return np.matmul(a, b) if out is None else np.matmul(a, b, out=out)
    return _converted(a, b, out, dtype)


def _of_backend(a: Array, b: Array, out: Array | None, dtype: Any) -> Array:
    """The product as a device or a dry run computes it."""
    xp = backend_of(a).xp
    if out is None:
        y = xp.matmul(a, b)
        return y if dtype is None or y.dtype == dtype else y.astype(dtype)
    if out.dtype == a.dtype == b.dtype:
        return xp.matmul(a, b, out=out)
    out[...] = xp.matmul(a, b)
    return out


def _converted(a: np.ndarray, b: np.ndarray, out: np.ndarray | None, dtype: Any) -> np.ndarray:
    """The product of operands in the dtype of sums, rounded to that of the result."""
    if dtype is None:
        dtype = np.result_type(a.dtype, b.dtype) if out is None else out.dtype
    (m, k), n = a.shape[-2:], b.shape[-1]
    if a.ndim == b.ndim == 2 and is_half(a.dtype) and k > 2 * max(m, n):
        return _summed_in_pieces(a, b, out, dtype)
    if a.ndim == b.ndim == 2 and is_half(a.dtype) and m >= PIECE:
        b, y = widened(b), np.empty((m, n), dtype) if out is None else out
        for part in _pieces(m):
            rounded(np.matmul(widened(a[part]), b), y.dtype, y[part])
        return y
    a, b = widened(a), widened(b)
    y = np.matmul(a, b, out=out if out is not None and out.dtype == a.dtype == b.dtype else None)
    return y if y is out else rounded(y, dtype, out)


# --- Products of 16-bit floats by a library without them: float32 copies of pieces stay in cache


PIECE = 512  # rows of an operand


def _summed_in_pieces(a: np.ndarray, b: np.ndarray, out: np.ndarray | None, dtype: Any) -> np.ndarray:
    """a[m k] · b[k n] for a long k, as of a weight's gradient."""
    wide = accumulated_in(a.dtype)
    fits = out is not None and out.dtype == wide and out.flags.c_contiguous
    total: Any = out if fits else np.empty((a.shape[0], b.shape[1]), wide)
    for part in _pieces(a.shape[1]):
        operands = widened(a[:, part]), widened(b[part])
        if part.start == 0:
            np.matmul(*operands, out=total)
        else:
            total += np.matmul(*operands)
    return total if total is out else rounded(total, dtype, out)


def _pieces(length: int) -> list[slice]:
    return [slice(start, min(start + PIECE, length)) for start in range(0, length, PIECE)]
