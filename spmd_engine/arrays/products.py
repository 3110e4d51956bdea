"""Matrix products of float32, float64 and bfloat16 arrays behind one function, by the fastest library for each.

NumPy's BLAS computes every product; other libraries (``product_libraries``) compute those for which a job has chosen
them (``use``), by dtype and size class. A product of bfloat16 operands sums in float32 and is rounded once, to nearest
even, to the dtype of its result. NumPy has no such product: it multiplies float32 copies. float64 is always NumPy's.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import HALF_DTYPES, accumulated_in, is_half, rounded, widened
from spmd_engine.arrays.product_libraries.library import ProductLibrary
from spmd_engine.arrays.windows import Window

BFLOAT16, FLOAT32 = np.dtype(bfloat16), np.dtype(np.float32)
_HOST_ARRAY = np.ndarray

NUMPY = "numpy"  #: the name of NumPy's BLAS among libraries

#: Rows of the smaller operand up to which a product is one of ``few`` rows: its time is that of reading the other.
FEW = 32
#: Multiplications of one matrix product below which it is tiny, and from which on it is large.
TINY, LARGE = 1 << 18, 1 << 23
#: Size classes, each with a product (m, k, n) that represents it.
SIZES = {"tiny": (48, 48, 48), "row": (1, 384, 1536), "few": (8, 384, 1536), "small": (256, 64, 256)} | {
    "large": (2048, 384, 1536)
}
DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16}  #: operands that other libraries than NumPy multiply


_chosen: dict[str, ProductLibrary] = {}  # by dtype and size class: see ``Kind.of``
unfit: Counter[str] = Counter()  #: products that NumPy computed since the chosen library does not take their operands


def use(libraries: Mapping[tuple[str, str], ProductLibrary]) -> None:
    """Let these libraries compute products, by dtype and size class (``DTYPES``, ``SIZES``), and NumPy all others."""
    _chosen.clear()
    _chosen.update({f"{dtype} {size}": library for (dtype, size), library in libraries.items()})


def in_use() -> dict[str, dict[str, str]]:
    """The names of the libraries in use, by dtype and size class."""
    return {
        name: {size: library.name if (library := _chosen.get(f"{name} {size}")) else NUMPY for size in SIZES}
        for name in DTYPES
    }


# A library's threads do not exist in a forked child, which would wait for them.
os.register_at_fork(after_in_child=_chosen.clear)


class Kind(NamedTuple):
    """What follows from the shapes and dtypes of a product's operands alone."""

    of: str  #: the dtype and the size class, by which ``use`` chooses; empty: NumPy computes it
    is_plain: bool  #: whether NumPy multiplies the operands as they are, at once


@lru_cache(maxsize=4096)
def kind_of(shape: tuple[int, ...], dtype: Any, other: tuple[int, ...], other_dtype: Any) -> Kind:
    """The kind of the product of operands with these shapes and dtypes."""
    if dtype != other_dtype or min(len(shape), len(other)) < 2:
        return Kind("", dtype == other_dtype and dtype not in HALF_DTYPES)
    (m, k), n = shape[-2:], other[-1]
    in_parts = len(shape) == len(other) == 2 and 1 < min(m, n) <= FEW and max(m, n) * k * dtype.itemsize >= LEAST_BYTES
    of = f"{dtype} {size_class(m, k, n)}" if dtype in DTYPES.values() else ""
    return Kind(of, dtype not in HALF_DTYPES and not in_parts)


def matmul(a: Array, b: Array, out: Array | None = None, dtype: Any = None, kind: Kind | None = None) -> Array:
    """``numpy.matmul``: y[... m n] = a[... m k] · b[... k n], of the arrays of any backend.

    ``dtype`` is that of the result, by default that of ``out``, or else of a sum of both operands. bfloat16 operands
    may have a float32 result. ``kind`` is that of the operands, if the caller knows it.
    """
    if type(a) is not _HOST_ARRAY or type(b) is not _HOST_ARRAY:
        return _of_backend(a, b, out, dtype)
    of, is_plain = kind or kind_of(a.shape, a.dtype, b.shape, b.dtype)
    if _chosen and (library := _chosen.get(of)) is not None and accumulated_in(a.dtype) == FLOAT32:
        return product_by(library, a, b, out, dtype)
    if is_plain and (dtype is None or dtype == a.dtype):
        return np.matmul(a, b) if out is None else np.matmul(a, b, out=out)
    return _of_numpy(a, b, out, dtype)


def convolve(kind: str, x: np.ndarray, w: np.ndarray, y: np.ndarray, rows: Window, columns: Window) -> bool:
    """As ProductLibrary.convolve, by the library for large products of bfloat16; False without one."""
    library = _chosen.get("bfloat16 large")
    if library is None:
        return False
    x, w, y = np.ascontiguousarray(x), np.ascontiguousarray(w), np.ascontiguousarray(y)
    return library.convolve(kind, x, w, y, rows, columns)


def product_by(
    library: ProductLibrary | None, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None, dtype: Any = None
) -> np.ndarray:
    """The product by this library, or by NumPy: with None, and if the library does not take the operands."""
    if a.ndim > b.ndim == 2 and out is None:  # libraries take as many dims of one operand as of the other
        return product_by(library, a.reshape(-1, a.shape[-1]), b, None, dtype).reshape(*a.shape[:-1], b.shape[-1])
    if library is not None and (y := _by(library, a, b, out, dtype)) is not None:
        return y
    return _of_numpy(a, b, out, dtype)


def size_class(m: int, k: int, n: int) -> str:
    """The class, of ``SIZES``, of the product of matrices [m k] and [k n]."""
    fewest, multiplications = min(m, n), m * k * n
    if multiplications < TINY:
        return "tiny"
    if fewest <= FEW:
        return "few" if fewest > 1 else "row"
    return "large" if multiplications >= LARGE else "small"


def _by(library: ProductLibrary, a: np.ndarray, b: np.ndarray, out: np.ndarray | None, dtype: Any) -> np.ndarray | None:
    """The product by this library; None if it does not take the operands."""
    wanted = np.dtype(dtype) if dtype is not None else a.dtype if out is None else out.dtype
    rest, others = a.shape[:-2], b.shape[:-2]
    shape = (*(rest if rest == others else np.broadcast_shapes(rest, others)), a.shape[-2], b.shape[-1])
    direct = (a.dtype, FLOAT32) if library.rounds else (FLOAT32,)  # dtypes that the library writes
    if out is not None and out.shape == shape and out.dtype in direct and _is_free(out, a, b):
        y = out
    else:
        y = np.empty(shape, wanted if wanted in direct else FLOAT32)
    if a.shape[-1] != b.shape[-2] or not library.multiply(a, b, y):
        unfit[f"{a.dtype} by {library.name}"] += 1
        return None
    return y if y is out else rounded(y, wanted, out)


def _is_free(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> bool:
    return out.flags.writeable and not np.may_share_memory(out, a) and not np.may_share_memory(out, b)


def _of_numpy(a: np.ndarray, b: np.ndarray, out: np.ndarray | None, dtype: Any) -> np.ndarray:
    """The product by NumPy's BLAS, perhaps of copies or of parts."""
    if a.dtype in HALF_DTYPES or a.dtype != b.dtype or (dtype is not None and dtype != a.dtype):
        if dtype is None:
            dtype = np.result_type(a.dtype, b.dtype) if out is None else out.dtype
        return _of_copies(a, b, out, dtype)
    return _of_few_rows(a, b) if out is None else np.matmul(a, b, out=out)


def _of_backend(a: Array, b: Array, out: Array | None, dtype: Any) -> Array:
    """The product as a device or a dry run computes it."""
    backend = backend_of(a)
    xp = backend.xp
    if backend.on_device and (is_half(a.dtype) or is_half(b.dtype)):
        dtype = out.dtype if out is not None else np.result_type(a.dtype, b.dtype) if dtype is None else dtype
        if a.dtype == b.dtype and accumulated_in(a.dtype) == FLOAT32 and a.ndim > 1 and b.ndim > 1:
            return backend.kernels.matmul_halves(a, b, out, dtype)
        return rounded(xp.matmul(widened(a), widened(b)), dtype, out)
    if out is None:
        y = xp.matmul(a, b)
        return y if dtype is None or y.dtype == dtype else y.astype(dtype)
    if out.dtype == a.dtype == b.dtype:
        return xp.matmul(a, b, out=out)
    out[...] = xp.matmul(a, b)
    return out


# --- Products of 16-bit floats by a library without them: float32 copies of pieces stay in cache


PIECE = 512  # rows of an operand


def _of_copies(a: np.ndarray, b: np.ndarray, out: np.ndarray | None, dtype: Any) -> np.ndarray:
    """The product of copies in the dtype of sums, rounded to that of the result."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    if a.ndim == b.ndim == 2 and is_half(a.dtype) and k > 2 * max(m, n):
        return _summed_in_pieces(a, b, out, dtype)
    if a.ndim == b.ndim == 2 and is_half(a.dtype) and m >= PIECE:
        b, y = widened(b), np.empty((m, n), dtype) if out is None else out
        for part in _pieces(m):
            rounded(np.matmul(widened(a[part]), b), y.dtype, y[part])
        return y
    a, b = widened(a), widened(b)
    fits = out is not None and out.dtype == a.dtype == b.dtype
    y = np.matmul(a, b, out=out) if fits else _of_few_rows(a, b)
    return y if y is out else rounded(y, dtype, out)


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


# --- Products of few rows and a large matrix: a decode step of several sequences
#
# BLAS copies the matrix into its own order before it multiplies. With few rows, this copy takes most of the time;
# with parts of the matrix that stay in the cache it costs little: two to three times faster at 2 to 16 rows.


PART_BYTES = 300_000  # a part of the matrix: with its copy, less than a core's L2 cache
LEAST_BYTES = 1_000_000  # the smallest matrix for which parts are faster


def _of_few_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a · b, whichever of the two is the large matrix, if one is; for one row, BLAS copies nothing."""
    if a.ndim == b.ndim == 2 and a.dtype == b.dtype and 1 < min(len(a), b.shape[1]) <= FEW:
        if _is_worth_it(a, b):
            return _by_parts(a, b)
        if _is_worth_it(b.T, a.T):
            return _by_parts(b.T, a.T).T
    return np.matmul(a, b)


def _is_worth_it(few: np.ndarray, large: np.ndarray) -> bool:
    in_order = large.flags.c_contiguous or large.flags.f_contiguous
    return len(few) <= FEW and large.nbytes >= LEAST_BYTES and in_order


def _by_parts(few: np.ndarray, large: np.ndarray) -> np.ndarray:
    """few[m k] · large[k n], by rows of ``large`` as it lies in memory."""
    if not large.flags.c_contiguous:
        y = np.empty((len(few), large.shape[1]), few.dtype)
        for part in _parts(large.T):
            np.matmul(few, large[:, part], out=y[:, part])
        return y
    y: Any = None
    for part in _parts(large):
        partial_sum = few[:, part] @ large[part]
        y = partial_sum if y is None else np.add(y, partial_sum, out=y)
    return y


def _parts(rows: np.ndarray) -> list[slice]:
    step = max(8, PART_BYTES // rows[0].nbytes)
    return [slice(begin, begin + step) for begin in range(0, len(rows), step)]
