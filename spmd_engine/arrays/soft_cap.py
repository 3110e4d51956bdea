"""Soft caps: scores and logits that are kept below a limit."""

from __future__ import annotations

from spmd_engine.arrays.backend import Array, backend_of


def soft_cap(x: Array, cap: float) -> None:
    """x = cap · tanh(x / cap), in place."""
    x /= cap
    backend_of(x).xp.tanh(x, out=x)
    x *= cap


def soft_cap_slope(y: Array, cap: float) -> Array:
    """dy/dx of y = cap · tanh(x / cap), by what came out: 1 - (y / cap)²."""
    slope = y / -cap
    slope *= y / cap
    slope += 1.0
    return slope
