"""Matrix products of 16-bit floats on a CUDA device, with sums in float32, by cuBLAS.

CuPy's ``matmul`` has no such product: it rounds every result to 16 bits, multiplies float32 copies of batches of
float16, and cannot multiply batches of bfloat16. Here a result is float32 or 16 bits, and operands are copied only if
neither their rows nor their columns are contiguous, or batches are not equally far apart.
"""

from __future__ import annotations

from ctypes import addressof, c_float
from math import prod
from typing import Any

from spmd_engine.arrays.backend import Array

_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
_AS_IS, _TRANSPOSED = 0, 1  # cublasOperation_t
_FLOAT32_SUMS, _ANY_ALGORITHM = 68, -1  # CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
_ONE, _ZERO = c_float(1.0), c_float(0.0)


def multiply(cupy: Any, a: Array, b: Array, out: Array | None, dtype: Any) -> Array:
    """a[... m k] · b[... k n], both bfloat16 or both float16, in ``out`` if given; ``dtype`` is float32 or theirs."""
    batch = cupy.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = *batch, a.shape[-2], b.shape[-1]
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"shapes {a.shape} and {b.shape} do not fit in a matrix product")
    y = out
    if y is None or y.dtype != dtype or y.shape != shape or not y.flags.c_contiguous:
        y = cupy.empty(shape, dtype)
    if not a.size or not b.size:
        y[...] = 0
    elif y.size:
        (a, *of_a), (b, *of_b) = _matrices(cupy, a, batch), _matrices(cupy, b, batch)
        m, n, k = shape[-2], shape[-1], a.shape[-1]
        operands = [(x.data.ptr, _TYPES[x.dtype.name], lead, stride) for x, (_, lead, stride) in ((b, of_b), (a, of_a))]
        # cuBLAS counts by columns: it computes yᵀ = bᵀ · aᵀ.
        cupy.cuda.cublas.gemmStridedBatchedEx(
            cupy.cuda.get_cublas_handle(), of_b[0], of_a[0], n, m, k, addressof(_ONE), *operands[0], *operands[1],
            addressof(_ZERO), y.data.ptr, _TYPES[y.dtype.name], n, m * n, prod(batch), _FLOAT32_SUMS, _ANY_ALGORITHM,
        )  # fmt: skip
    if out is not None and y is not out:
        out[...] = y
        return out
    return y


def _matrices(cupy: Any, x: Array, batch: tuple[int, ...]) -> tuple[Array, int, int, int]:
    """``x``, or a copy that fits, whether its matrices are transposed, and the elements from one row (or column) and
    from one matrix to the next."""
    x = x if x.shape[:-2] == batch else cupy.broadcast_to(x, (*batch, *x.shape[-2:]))
    rows, columns = x.shape[-2:]
    steps = [stride // x.itemsize for stride in x.strides]
    apart, expected, fits = 0, None, True
    for length, step in zip(reversed(batch), reversed(steps[:-2]), strict=True):
        if length > 1:
            apart, fits = (step, fits) if expected is None else (apart, fits and step == expected)
            expected = step * length
    by_rows = steps[-1] == 1 or columns == 1, steps[-2] if rows > 1 else columns
    by_columns = steps[-2] == 1 or rows == 1, steps[-1] if columns > 1 else rows
    if fits and by_rows[0] and by_rows[1] >= columns:
        return x, _AS_IS, by_rows[1], apart
    if fits and by_columns[0] and by_columns[1] >= rows:
        return x, _TRANSPOSED, by_columns[1], apart
    return cupy.ascontiguousarray(x), _AS_IS, columns, rows * columns
