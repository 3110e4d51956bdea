"""16-bit floats: arrays of them are stored and sent; sums of them are wider, and each result is rounded once.

``emulated`` replaces float32 by float64 as the dtype of these sums, so that the order of terms, which may depend on the
mesh, changes no result: two meshes that round at the same points then agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ml_dtypes import bfloat16

from spmd_engine.arrays.backend import CPU, Array
from spmd_engine.arrays.dtypes import described
from spmd_engine.errors import UsageError, one_of

HALVES = ("bfloat16", "float16")
FLOATS = ("float32", *HALVES, "float64")  #: precisions by name

#: The dtypes of 16-bit floats on the host: ``x.dtype in HALF_DTYPES`` where a call of ``is_half`` costs much.
HALF_DTYPES = frozenset({CPU.xp.dtype("float16"), CPU.xp.dtype(bfloat16)})

_WIDE, _EXACT = CPU.xp.dtype("float32"), CPU.xp.dtype("float64")
_sums = [_WIDE]  # the dtype of sums of 16-bit floats comes last


def is_half(dtype: Any) -> bool:
    """Whether a dtype is bfloat16 or float16."""
    return dtype.itemsize == 2 and (dtype.kind == "f" or dtype.isbuiltin == 2)  # 2: bfloat16, of ml_dtypes


def is_float(dtype: Any) -> bool:
    """Whether a dtype is one of real floats, of any size."""
    return dtype.kind == "f" or is_half(dtype)


def dtype_of(precision: Any) -> Any:
    """The dtype of a name, also "bfloat16", or of anything else that ``numpy.dtype`` takes."""
    return described(precision) if isinstance(precision, str) else CPU.xp.dtype(precision)


def float_dtype(what: str, precision: Any) -> Any:
    """The dtype of one of ``FLOATS``, by its name or itself; ``what`` it is for. Raises UsageError for another one."""
    try:
        if (dtype := dtype_of(precision)).name in FLOATS:
            return dtype
    except (TypeError, AttributeError):
        pass
    raise UsageError(f"{what}: dtype is {precision!r}; {one_of(precision, FLOATS)}")


def accumulated_in(dtype: Any) -> Any:
    """The dtype of sums of ``dtype``: float32 (emulated: float64) for float16 and bfloat16, else the same."""
    return _sums[-1] if is_half(dtype) else dtype


def widened(x: Array) -> Array:
    """``x`` in the dtype of its sums; itself unless it has 16-bit floats."""
    return x.astype(_sums[-1]) if is_half(x.dtype) else x


def rounded(x: Array, dtype: Any, out: Array | None = None) -> Array:
    """``x`` in this dtype, in ``out`` if given, to nearest even; NaN stays NaN. Itself if nothing is to be done.

    A compiled loop takes a fifth of the time of NumPy's ``astype`` to bfloat16.
    """
    if out is None and x.dtype == dtype:
        return x
    dtype = CPU.xp.dtype(dtype)
    kernels = CPU.kernels if type(x) is CPU.xp.ndarray and x.dtype == CPU.xp.float32 and dtype.isbuiltin == 2 else None
    if kernels is not None and (out is None or out.flags.c_contiguous):
        return kernels.round_to_bfloat16(x, out)
    with CPU.xp.errstate(invalid="ignore", over="ignore"):  # for NaN, and for numbers that become infinite
        if out is None:
            return x.astype(dtype)
        out[...] = x
    return out


def scaled(x: Array, factor: float) -> Array:
    """x · factor in the dtype of ``x``: a product of 16-bit floats and a number of Python's would be float32."""
    return rounded(widened(x) * factor, x.dtype)


@contextmanager
def emulated() -> Iterator[None]:
    """In this context, which must surround the making of engines, too, sums of 16-bit floats are float64."""
    _sums.append(_EXACT)
    try:
        yield
    finally:
        _sums.pop()
