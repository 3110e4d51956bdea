"""The gate of a gated perceptron: SiLU, or another activation, of one projection times the other."""

from __future__ import annotations

from collections.abc import Callable

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.chunks import chunks
from spmd_engine.arrays.fused import fused

Activation = Callable[..., tuple[Array, Array | None]]  #: of z: its value and, if wanted, its slope
Gate = Callable[..., tuple[Array, tuple[Array, Array] | None]]  #: of z and u: h and, if wanted, its slopes


@fused
def silu_gate(z: Array, u: Array, want_slopes: bool = True) -> tuple[Array, tuple[Array, Array] | None]:
    """h = silu(z) · u with silu(z) = z sigmoid(z); and its slopes (dh/dz, dh/du), each shaped as z and u.

    Elfwing et al., "Sigmoid-weighted linear units" (2017); as a gate: Shazeer, "GLU variants improve transformer"
    (2020).
    """
    backend = backend_of(z)
    xp = backend.xp
    gates, values = z.reshape(-1), u.reshape(-1)
    h = xp.empty(gates.shape, z.dtype)
    slopes = (xp.empty(gates.shape, z.dtype), xp.empty(gates.shape, z.dtype)) if want_slopes else None
    with backend.errstate(over="ignore"):  # the exponential of a large -z is infinite, and the sigmoid rightly 0
        for part in chunks(gates):
            x, value = gates[part], values[part]
            sigmoid = xp.exp(-x)
            sigmoid += 1.0
            xp.reciprocal(sigmoid, out=sigmoid)
            silu = x * sigmoid
            xp.multiply(silu, value, out=h[part])
            if slopes is not None:
                # d silu / dz = sigmoid + silu (1 - sigmoid)
                slopes[1][part] = silu
                silu *= 1.0 - sigmoid
                silu += sigmoid
                xp.multiply(silu, value, out=slopes[0][part])
    shaped = None if slopes is None else (slopes[0].reshape(z.shape), slopes[1].reshape(z.shape))
    return h.reshape(z.shape), shaped


def gate_of(activation: Activation) -> Gate:
    """h = activation(z) · u and its slopes (dh/dz, dh/du), each shaped as z and u."""

    def gate(z: Array, u: Array, want_slopes: bool = True) -> tuple[Array, tuple[Array, Array] | None]:
        value, slope = activation(z, want_slope=want_slopes)
        return value * u, None if slope is None else (slope * u, value)

    return gate
