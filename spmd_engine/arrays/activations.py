"""Activations, gates and the softmax.

Each activation returns its value and, for the backward, its slope dy/dz: dz = dy * slope.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.factors import ERFC, GELU_A, GELU_C
from spmd_engine.arrays.fused import chunks, computed_wide, fused
from spmd_engine.arrays.precision import rounded, widened


@fused
def relu(z: Array, want_slope: bool = True) -> tuple[Array, Array | None]:
    """max(z, 0) and its slope, 0 at z = 0."""
    return backend_of(z).xp.maximum(z, 0), z > 0 if want_slope else None


@computed_wide
def relu_squared(z: Array, want_slope: bool = True) -> tuple[Array, Array | None]:
    """max(z, 0)² and its slope."""
    y = backend_of(z).xp.maximum(z, 0)
    return y * y, 2 * y if want_slope else None


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
    with backend.errstate(over="ignore"):  # the exponential of a large -2u is infinite, and g is then 0
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
            if slope is not None:
                # d/dz = g + z g (1 - g) 2u', with 2u' = 2c + 6 c a z^2
                square *= 6.0 * GELU_C * GELU_A
                square += 2.0 * GELU_C
                square *= out
                rest = xp.subtract(1.0, gate, out=slope[part])
                rest *= square
                rest += gate
    return y.reshape(z.shape), None if slope is None else slope.reshape(z.shape)


@computed_wide
def gelu_erf(z: Array, want_slope: bool = True) -> tuple[Array, Array | None]:
    """z · Φ(z), with Φ the normal distribution, and its slope Φ(z) + z φ(z): GELU itself, not its tanh form."""
    xp = backend_of(z).xp
    flat = z.reshape(-1)
    y = xp.empty_like(flat)
    slope = xp.empty_like(flat) if want_slope else None
    for part in chunks(flat):
        x = flat[part]
        bell = xp.exp(-0.5 * x * x)
        tail = _normal_tail(xp.abs(x)) * bell
        below = xp.where(x < 0, tail, 1.0 - tail)
        xp.multiply(x, below, out=y[part])
        if slope is not None:
            bell *= 1.0 / sqrt(2.0 * pi)
            bell *= x
            xp.add(below, bell, out=slope[part])
    return y.reshape(z.shape), None if slope is None else slope.reshape(z.shape)


def _normal_tail(x: Array) -> Array:
    """The normal distribution's tail beyond x >= 0, over exp(-x²/2): t/2 exp(g(t)) with t = 2 / (2 + x / sqrt(2)).

    g, with the Chebyshev coefficients ``ERFC``, is summed by Clenshaw's recurrence, without terms that vanish in this
    dtype. The form is that of Press et al., "Numerical Recipes" (2007), section 6.2.2.
    """
    xp = backend_of(x).xp
    smallest = float(xp.finfo(x.dtype).eps) / 8
    count = max(number for number, coefficient in enumerate(ERFC) if abs(coefficient) > smallest)
    t = 2.0 / (2.0 + x * sqrt(0.5))
    twice, last, before = 4.0 * t - 2.0, xp.zeros_like(x), xp.zeros_like(x)
    for coefficient in ERFC[count:0:-1]:
        last, before = twice * last - before + coefficient, last
    return 0.5 * t * xp.exp(0.5 * twice * last - before + ERFC[0])


# --- The gate of a gated perceptron: SiLU, or another activation, of one projection times the other


Activation = Callable[..., tuple[Array, Array | None]]  #: from z: its value and, if wanted, its slope
Gate = Callable[..., tuple[Array, tuple[Array, Array] | None]]  #: from z and u: h and, if wanted, its slopes


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
    with backend.errstate(over="ignore"):  # the exponential of a large -z is infinite, and the sigmoid is then 0
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


# --- Scores of attention and of the cross-entropy: soft caps, and the softmax in place over them


def soft_cap(x: Array, cap: float) -> None:
    """x = cap · tanh(x / cap), in place."""
    wide = widened(x)
    wide /= cap
    backend_of(x).xp.tanh(wide, out=wide)
    wide *= cap
    if wide is not x:
        rounded(wide, x.dtype, x)


def soft_cap_slope(y: Array, cap: float) -> Array:
    """dy/dx of y = cap · tanh(x / cap), from y: 1 - (y / cap)²."""
    wide = widened(y)
    slope = wide / -cap
    slope *= wide / cap
    slope += 1.0
    return rounded(slope, y.dtype)


# --- The elementwise steps of attention's softmax and of the softmax cross-entropy, each in place over its scores


@fused
def exponentiate(scores: Array, shift: Array) -> None:
    """scores = exp(scores - shift), in place."""
    scores -= shift
    backend_of(scores).xp.exp(scores, out=scores)


@fused
def softmax_backward(ds: Array, p: Array, projection: Array) -> None:
    """ds = (ds - projection) * p, in place: dp becomes the scores' gradient, with ``projection`` the sum of dp * p."""
    ds -= projection
    ds *= p


@fused
def scores_of_targets(scores: Array, targets: Array, top: Array) -> Array:
    """scores[n v] at targets[n], minus top[n], as [n]; 0 where a target is in another rank's shard of v."""
    result = backend_of(scores).xp.zeros(len(targets), scores.dtype)
    rows, columns = _find_local_targets(scores, targets)
    result[rows] = scores[rows, columns] - top[rows]
    return result


@fused
def cross_entropy_gradient(p: Array, sums: Array, weights: Array, targets: Array) -> None:
    """p[n v] of exponentials, with sums[n], becomes weights * (p / sums - [v = target]), in place."""
    p *= (weights / sums)[:, None]
    rows, columns = _find_local_targets(p, targets)
    p[rows, columns] -= weights[rows]


def _find_local_targets(scores: Array, targets: Array) -> tuple[Array, Array]:
    """The rows n of scores[n v] with a target in v, and these targets."""
    xp = backend_of(scores).xp
    (rows,) = (targets.astype(xp.uint64) < scores.shape[1]).nonzero()  # unsigned, so that negative ones are large
    return rows, targets[rows]
