"""Activations: each returns its value and, for the backward, its slope dy/dz; dz = dy * slope."""

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.chunks import chunks
from spmd_engine.arrays.factors import GELU_A, GELU_C
from spmd_engine.arrays.fused import fused


@fused
def relu(z: Array, want_slope: bool = True) -> tuple[Array, Array | None]:
    """max(z, 0) and its slope, 0 at z = 0."""
    return backend_of(z).xp.maximum(z, 0), z > 0 if want_slope else None


@fused
def gelu(z: Array, want_slope: bool = True) -> tuple[Array, Array | None]:
    """GPT-2's GELU, 0.5 z (1 + tanh(u)) with u = sqrt(2/pi) (z + 0.044715 z^3), and its slope.

    Hendrycks and Gimpel, "Gaussian error linear units" (2016), the tanh form. ``z`` is any shape, contiguous
    or not. It is computed as z g with the gate g = 1 / (1 + exp(-2u)): one exponential serves value and slope,
    and costs half of a tanh.
    """
    backend = backend_of(z)
    xp = backend.xp
    flat = z.reshape(-1)
    y = xp.empty_like(flat)
    slope = xp.empty_like(flat) if want_slope else None
    with backend.errstate(over="ignore"):  # the exponential of a large -2u is infinite, and g rightly 0
        for part in chunks(flat):
            x, out = flat[part], y[part]
            square = x * x
            gate = square * (-2.0 * GELU_C * GELU_A)
            gate -= 2.0 * GELU_C
            gate *= x
            xp.exp(gate, out=gate)
            gate += 1.0
            xp.reciprocal(gate, out=gate)
            xp.multiply(x, gate, out=out)
            if want_slope:
                # d/dz = g + z g (1 - g) 2u', with 2u' = 2c + 6 c a z^2
                square *= 6.0 * GELU_C * GELU_A
                square += 2.0 * GELU_C
                square *= out
                rest = xp.subtract(1.0, gate, out=slope[part])
                rest *= square
                rest += gate
    return y.reshape(z.shape), slope.reshape(z.shape) if want_slope else None
