"""Sums and products in place, in one compiled pass for bfloat16, whose ufuncs are ten times slower."""

from __future__ import annotations

from spmd_engine.arrays.backend import CPU, Array, backend_of
from spmd_engine.arrays.fused import kernels_for
from spmd_engine.arrays.precision import HALF_DTYPES


def add_to(x: Array, y: Array) -> Array:
    """x += y, for y shaped as x or its last dims; returns x."""
    if not (x.dtype in HALF_DTYPES and _changed_by_loop("add_halves", x, y)):
        x += y
    return x


def multiply_by(x: Array, y: Array) -> Array:
    """x *= y, for y shaped as x or its last dims; returns x."""
    if not (x.dtype in HALF_DTYPES and _changed_by_loop("multiply_halves", x, y)):
        x *= y
    return x


def _changed_by_loop(name: str, x: Array, y: Array) -> bool:
    return type(x) is CPU.xp.ndarray and bool(CPU.kernels) and CPU.kernels.change_halves(name, x, y)


def plus(x: Array, y: Array) -> Array:
    """x + y, both of one shape."""
    return add_to(x.copy(), y) if x.dtype in HALF_DTYPES else x + y


def kept_where(x: Array, flags: Array) -> Array:
    """x · flags, for ``flags`` shaped as x."""
    kernels = kernels_for(x, name="kept_where")
    return x * flags if kernels is None or backend_of(x).on_device else kernels.kept_where(x, flags)
