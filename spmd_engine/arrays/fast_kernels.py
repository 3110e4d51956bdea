"""Loops over float32 arrays that Numba compiles: every chain of elementwise steps is one pass over memory.

Imported only where Numba is installed. Compiled code is kept on disk, so it is compiled once on a machine. What is not
a number stays so. Numbers of Python count as float64 in a loop, hence ``f32`` around each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import int32, njit
from numba.core import types
from numba.extending import intrinsic

from spmd_engine.arrays.factors import GELU_A, GELU_C

f32 = np.float32

_LOWEST, _HIGHEST = -87.33, 89.0  # exp is 0 below, where float32 has no normal numbers, and infinite from 88.4 on


def compiled(loop: Callable) -> Callable:
    """Compile ``loop`` as it is written, but for products and sums that the processor makes in one."""
    return _compiled(loop, {"contract", "arcp", "nsz"})


def compiled_sums(loop: Callable) -> Callable:
    """Compile ``loop`` with its sums made in another order, several numbers at a time."""
    return _compiled(loop, {"contract", "arcp", "nsz", "reassoc"})


def _compiled(loop: Callable, fastmath: set[str]) -> Callable:
    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    try:
        return njit(cache=True, **options)(loop)
    except RuntimeError:  # no folder to keep it in: nobody may write to this package's, nor has the user a home
        return njit(**options)(loop)


@intrinsic
def _as_float(context, bits):
    """The float32 with these bits."""

    def generate(_, builder, __, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(inline="always")
def exponential(x):
    """exp(x) to 2 units in the last place: a power of 2 and a polynomial (Moshier's Cephes library, ``expf``)."""
    inside = f32(_LOWEST) if x < f32(_LOWEST) else (f32(_HIGHEST) if x > f32(_HIGHEST) else x)
    n = np.floor(inside * f32(1.44269504088896341) + f32(0.5))
    r = inside - n * f32(0.693359375) - n * f32(-2.12194440e-4)  # log(2), the first with few digits
    p = f32(1.9875691500e-4)
    p = p * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = p * r + f32(5.0000001201e-1)
    power = _as_float(int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    y = (p * r * r + r + f32(1)) * power
    return f32(0) if x < f32(_LOWEST) else y


# --- activations of flat z[n]


@compiled
def relu(z, y, slope):
    """y[n] and slope[n] of z[n]."""
    for i in range(z.size):
        y[i] = f32(0) if z[i] <= f32(0) else z[i]
        slope[i] = z[i] > f32(0)


@compiled
def relu_value(z, y):
    """y[n] of z[n]."""
    for i in range(z.size):
        y[i] = f32(0) if z[i] <= f32(0) else z[i]


@compiled
def gelu(z, y, slope):
    """y[n] and slope[n] of z[n]."""
    for i in range(z.size):
        x = z[i]
        square = x * x
        gate = f32(1) / (f32(1) + exponential(-x * (f32(2 * GELU_C) + f32(2 * GELU_C * GELU_A) * square)))
        value = x * gate
        y[i] = value
        slope[i] = gate + value * (f32(1) - gate) * (f32(2 * GELU_C) + f32(6 * GELU_C * GELU_A) * square)


@compiled
def gelu_value(z, y):
    """y[n] of z[n]."""
    for i in range(z.size):
        x = z[i]
        y[i] = x / (f32(1) + exponential(-x * (f32(2 * GELU_C) + f32(2 * GELU_C * GELU_A) * x * x)))


# --- layer norm of rows[n d]


@compiled_sums
def layer_norm(x, scale, shift, epsilon, y, normal, inverse):
    """y[n d], normal[n d] and inverse[n] of x[n d]."""
    rows, width = x.shape
    share = f32(1) / f32(width)
    for i in range(rows):
        total = f32(0)
        for j in range(width):
            total += x[i, j]
        mean = total * share
        squares = f32(0)
        for j in range(width):
            squares += (x[i, j] - mean) * (x[i, j] - mean)
        factor = f32(1) / np.sqrt(squares * share + epsilon)
        inverse[i] = factor
        for j in range(width):
            n = (x[i, j] - mean) * factor
            normal[i, j] = n
            y[i, j] = n * scale[j] + shift[j]


@compiled_sums
def layer_norm_backward(dy, normal, inverse, scale, dx):
    """dx[n d] of dy[n d]."""
    rows, width = dy.shape
    share = f32(1) / f32(width)
    for i in range(rows):
        total = projection = f32(0)
        for j in range(width):
            g = dy[i, j] * scale[j]
            total += g
            projection += g * normal[i, j]
        mean, along, factor = total * share, projection * share, inverse[i]
        for j in range(width):
            dx[i, j] = (dy[i, j] * scale[j] - mean - normal[i, j] * along) * factor


@compiled
def layer_norm_backward_parameters(dy, normal, dscale, dshift):
    """Add to dscale[d] and dshift[d] those of dy[n d]."""
    rows, width = dy.shape
    for i in range(rows):
        for j in range(width):
            dscale[j] += dy[i, j] * normal[i, j]
            dshift[j] += dy[i, j]


# --- optimizers of flat p[n]


@compiled
def adamw(p, g, mean, square, fresh, beta1, weight, beta2, epsilon, size, kept):
    """A step of p[n], mean[n] and square[n], in place; the numbers are the factors of its update."""
    for i in range(p.size):
        part = g[i] * fresh
        m = mean[i] * beta1 + part
        v = square[i] * beta2 + part * part * weight
        mean[i] = m
        square[i] = v
        p[i] = p[i] * kept - m / (np.sqrt(v) + epsilon) * size


@compiled
def sgd(p, g, size, kept):
    """A step of p[n], in place."""
    for i in range(p.size):
        p[i] = p[i] * kept - g[i] * size


@compiled
def momentum_sgd(p, g, velocity, scale, momentum, rate, kept):
    """A step of p[n] and velocity[n], in place."""
    for i in range(p.size):
        v = velocity[i] * momentum + g[i] * scale
        velocity[i] = v
        p[i] = p[i] * kept - v * rate


# --- softmax


@compiled
def exponentiate_rows(scores, shift):
    """scores[n v] become exp(scores - shift[n])."""
    rows, width = scores.shape
    for i in range(rows):
        for j in range(width):
            scores[i, j] = exponential(scores[i, j] - shift[i])


@compiled
def exponentiate_columns(scores, shift):
    """scores[h t s] become exp(scores - shift[h s])."""
    heads, keys, width = scores.shape
    for h in range(heads):
        for t in range(keys):
            for j in range(width):
                scores[h, t, j] = exponential(scores[h, t, j] - shift[h, j])


@compiled
def softmax_backward(ds, p, projection):
    """ds[h t s] become (ds - projection[h s]) * p[h t s]."""
    heads, keys, width = ds.shape
    for h in range(heads):
        for t in range(keys):
            for j in range(width):
                ds[h, t, j] = (ds[h, t, j] - projection[h, j]) * p[h, t, j]


@compiled
def scores_of_targets(scores, targets, top, found):
    """found[n] = scores[n v] at targets[n], less top[n]; 0 where that is none of v."""
    for i in range(targets.size):
        target = targets[i]
        found[i] = scores[i, target] - top[i] if 0 <= target < scores.shape[1] else f32(0)


@compiled
def cross_entropy_gradient(p, sums, weights, targets):
    """p[n v] become weights[n] * (p / sums[n] - [v = targets[n]])."""
    rows, width = p.shape
    for i in range(rows):
        factor = weights[i] / sums[i]
        for j in range(width):
            p[i, j] *= factor
        if 0 <= targets[i] < width:
            p[i, targets[i]] -= weights[i]
