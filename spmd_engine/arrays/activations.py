"""Activations: each returns its value and, for the backward, its slope dy/dz; dz = dy * slope."""

from math import pi, sqrt

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.chunks import chunks

_C = sqrt(2.0 / pi)
_A = 0.044715


def relu(z: Array, want_slope: bool = True) -> tuple[Array, Array | None]:
    """max(z, 0) and its slope, 0 at z = 0."""
    slope = z > 0
    return z * slope, slope if want_slope else None


def gelu(z: Array, want_slope: bool = True) -> tuple[Array, Array | None]:
    """GPT-2's GELU, 0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))), and its slope.

    Hendrycks and Gimpel, "Gaussian error linear units" (2016), the tanh form. ``z`` is any shape, contiguous
    or not; one tanh serves value and slope.
    """
    xp = backend_of(z).xp
    flat = z.reshape(-1)
    y = xp.empty_like(flat)
    slope = xp.empty_like(flat) if want_slope else None
    for part in chunks(flat):
        x, out = flat[part], y[part]
        square = x * x
        t = square * (_C * _A)
        t += _C
        t *= x
        xp.tanh(t, out=t)
        xp.add(t, 1.0, out=out)
        out *= 0.5
        if want_slope:
            # d/dz = 0.5 (1 + t) + 0.5 z (1 - t^2) (c + 3 c a z^2)
            square *= 1.5 * _C * _A
            square += 0.5 * _C
            square *= x
            t *= t
            xp.subtract(1.0, t, out=t)
            square *= t
            xp.add(square, out, out=slope[part])
        out *= x
    return y.reshape(z.shape), slope.reshape(z.shape) if want_slope else None
