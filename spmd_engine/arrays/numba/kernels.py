"""Loops over float32 arrays that Numba compiles: every chain of elementwise steps is one pass over memory.

Imported only where they are compiled (``compile``). A loop is compiled once, for the types of its annotations; it
writes to its arguments and allocates nothing. NaNs propagate. Numbers of Python count as float64 in a loop, hence
``f32`` around each.
"""

# pyright: reportInvalidTypeForm=false, reportCallIssue=false
# The annotations of a loop are types of Numba, which adds the first argument of an intrinsic.

from collections.abc import Callable, Set
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import int32, njit
from numba.core import types
from numba.extending import intrinsic

from spmd_engine.arrays.factors import GELU_A, GELU_C

f32 = np.float32

# What loops take: contiguous arrays of 1, 2, 3 and 4 dimensions, numbers, and tuples of four.
Vector, Rows, Blocks, Images = (types.Array(types.float32, dimensions, "C") for dimensions in (1, 2, 3, 4))
Flags, Indices = types.Array(types.boolean, 1, "C"), types.Array(types.int64, 1, "C")
HalfRows = types.Array(types.int16, 2, "C")
Bits, Halves = types.Array(types.int32, 1, "C"), types.Array(types.int16, 1, "C")  # of float32 and of bfloat16
Number, Integer, Four = types.float32, types.int64, types.UniTuple(types.int64, 4)

_LOWEST, _HIGHEST = -87.33, 89.0  # exp is 0 below, where float32 has no normal numbers, and infinite from 88.4 on


@dataclass(frozen=True)
class Loop:
    """A function to compile, and the changes of order and rounding that LLVM may make."""

    function: Callable
    fastmath: Set[str]


def compiled(loop: Callable) -> Loop:
    """Compile ``loop`` in the written order; a product and a sum may become one instruction."""
    return Loop(loop, {"contract", "arcp", "nsz"})


def compiled_sums(loop: Callable) -> Loop:
    """Compile ``loop`` with its sums in another order, several numbers at a time."""
    return Loop(loop, {"contract", "arcp", "nsz", "reassoc"})


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
    r = inside - n * f32(0.693359375) - n * f32(-2.12194440e-4)  # log(2) in two parts, the first with few digits
    p = f32(1.9875691500e-4)
    p = p * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = p * r + f32(5.0000001201e-1)
    power = _as_float(int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    y = (p * r * r + r + f32(1)) * power
    return f32(0) if x < f32(_LOWEST) else y


# --- bfloat16: the upper half of a float32


@intrinsic
def _as_bits(context, number):
    """The bits of this float32."""

    def generate(_, builder, __, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@njit(inline="always")
def _widened(half):
    return _as_float(int32(int32(half) << int32(16)))


@njit(inline="always")
def _rounded(x):
    """The upper half of x, rounded to nearest even; NaN stays NaN."""
    bits = _as_bits(x)
    half = int32(bits >> int32(16))
    even = int32(int32(bits + int32(0x7FFF)) + int32(half & int32(1))) >> int32(16)
    return np.int16(half | int32(0x40)) if x != x else np.int16(even)


@compiled
def add_halves(x: HalfRows, y: HalfRows):
    """x[n d] += y[n d], or y[1 d]."""
    rows, width = x.shape
    for i in range(rows):
        row = i if y.shape[0] > 1 else 0
        for j in range(width):
            x[i, j] = _rounded(_widened(x[i, j]) + _widened(y[row, j]))


@compiled
def multiply_halves(x: HalfRows, y: HalfRows):
    """x[n d] *= y[n d], or y[1 d]."""
    rows, width = x.shape
    for i in range(rows):
        row = i if y.shape[0] > 1 else 0
        for j in range(width):
            x[i, j] = _rounded(_widened(x[i, j]) * _widened(y[row, j]))


@compiled
def round_to_bfloat16(x: Bits, y: Halves):
    """y[n] is x[n] rounded to nearest even; NaN stays NaN."""
    sign_less, infinity, quiet = int32(0x7FFFFFFF), int32(0x7F800000), int32(0x40)
    for i in range(x.size):
        half = int32(x[i] >> int32(16))
        even = int32(int32(x[i] + int32(0x7FFF)) + int32(half & int32(1))) >> int32(16)
        y[i] = np.int16(half | quiet) if int32(x[i] & sign_less) > infinity else np.int16(even)


# --- activations of flat z[n]


@compiled
def relu(z: Vector, y: Vector, slope: Flags):
    """y[n] and slope[n] of z[n]."""
    for i in range(z.size):
        y[i] = f32(0) if z[i] <= f32(0) else z[i]
        slope[i] = z[i] > f32(0)


@compiled
def relu_value(z: Vector, y: Vector):
    """y[n] of z[n]."""
    for i in range(z.size):
        y[i] = f32(0) if z[i] <= f32(0) else z[i]


@compiled
def gelu(z: Vector, y: Vector, slope: Vector):
    """y[n] and slope[n] of z[n]."""
    for i in range(z.size):
        x = z[i]
        square = x * x
        gate = f32(1) / (f32(1) + exponential(-x * (f32(2 * GELU_C) + f32(2 * GELU_C * GELU_A) * square)))
        value = x * gate
        y[i] = value
        slope[i] = gate + value * (f32(1) - gate) * (f32(2 * GELU_C) + f32(6 * GELU_C * GELU_A) * square)


@compiled
def gelu_value(z: Vector, y: Vector):
    """y[n] of z[n]."""
    for i in range(z.size):
        x = z[i]
        y[i] = x / (f32(1) + exponential(-x * (f32(2 * GELU_C) + f32(2 * GELU_C * GELU_A) * x * x)))


# --- layer norm of rows[n d]


@compiled_sums
def layer_norm(x: Rows, scale: Vector, shift: Vector, epsilon: Number, y: Rows, normal: Rows, inverse: Vector):
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
def layer_norm_backward(dy: Rows, normal: Rows, inverse: Vector, scale: Vector, dx: Rows):
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
def layer_norm_backward_parameters(dy: Rows, normal: Rows, dscale: Vector, dshift: Vector):
    """Add the gradients of dy[n d] to dscale[d] and dshift[d]."""
    rows, width = dy.shape
    for i in range(rows):
        for j in range(width):
            dscale[j] += dy[i, j] * normal[i, j]
            dshift[j] += dy[i, j]


# --- optimizers of flat p[n]


@compiled
def adamw(
    p: Vector,
    g: Vector,
    mean: Vector,
    square: Vector,
    fresh: Number,
    beta1: Number,
    weight: Number,
    beta2: Number,
    epsilon: Number,
    size: Number,
    kept: Number,
):
    """A step of p[n], mean[n] and square[n], in place; the numbers are the factors of its update."""
    for i in range(p.size):
        part = g[i] * fresh
        m = mean[i] * beta1 + part
        v = square[i] * beta2 + part * part * weight
        mean[i] = m
        square[i] = v
        p[i] = p[i] * kept - m / (np.sqrt(v) + epsilon) * size


@compiled
def sgd(p: Vector, g: Vector, size: Number, kept: Number):
    """A step of p[n], in place."""
    for i in range(p.size):
        p[i] = p[i] * kept - g[i] * size


@compiled
def momentum_sgd(p: Vector, g: Vector, velocity: Vector, scale: Number, momentum: Number, rate: Number, kept: Number):
    """A step of p[n] and velocity[n], in place."""
    for i in range(p.size):
        v = velocity[i] * momentum + g[i] * scale
        velocity[i] = v
        p[i] = p[i] * kept - v * rate


# --- softmax


@compiled
def exponentiate_rows(scores: Rows, shift: Vector):
    """scores[n v] become exp(scores - shift[n])."""
    rows, width = scores.shape
    for i in range(rows):
        for j in range(width):
            scores[i, j] = exponential(scores[i, j] - shift[i])


@compiled
def exponentiate_columns(scores: Blocks, shift: Rows):
    """scores[h t s] become exp(scores - shift[h s])."""
    heads, keys, width = scores.shape
    for h in range(heads):
        for t in range(keys):
            for j in range(width):
                scores[h, t, j] = exponential(scores[h, t, j] - shift[h, j])


@compiled
def softmax_backward(ds: Blocks, p: Blocks, projection: Rows):
    """ds[h t s] become (ds - projection[h s]) * p[h t s]."""
    heads, keys, width = ds.shape
    for h in range(heads):
        for t in range(keys):
            for j in range(width):
                ds[h, t, j] = (ds[h, t, j] - projection[h, j]) * p[h, t, j]


@compiled
def scores_of_targets(scores: Rows, targets: Indices, top: Vector, result: Vector):
    """result[n] = scores[n v] at targets[n], minus top[n]; 0 where the target is not in v."""
    for i in range(targets.size):
        target = targets[i]
        result[i] = scores[i, target] - top[i] if 0 <= target < scores.shape[1] else f32(0)


@compiled
def cross_entropy_gradient(p: Rows, sums: Vector, weights: Vector, targets: Indices):
    """p[n v] become weights[n] * (p / sums[n] - [v = targets[n]])."""
    rows, width = p.shape
    for i in range(rows):
        factor = weights[i] / sums[i]
        for j in range(width):
            p[i, j] *= factor
        if 0 <= targets[i] < width:
            p[i, targets[i]] -= weights[i]


# --- Loops of Llama models: RMS norm, gated perceptrons, rotary positions


# --- RMS norm of rows[n d]


@compiled_sums
def rms_norm(x: Rows, scale: Vector, epsilon: Number, y: Rows, normal: Rows, inverse: Vector):
    """y[n d], normal[n d] and inverse[n] of x[n d]."""
    rows, width = x.shape
    share = f32(1) / f32(width)
    for i in range(rows):
        squares = f32(0)
        for j in range(width):
            squares += x[i, j] * x[i, j]
        factor = f32(1) / np.sqrt(squares * share + epsilon)
        inverse[i] = factor
        for j in range(width):
            n = x[i, j] * factor
            normal[i, j] = n
            y[i, j] = n * scale[j]


@compiled_sums
def rms_norm_backward(dy: Rows, normal: Rows, inverse: Vector, scale: Vector, dx: Rows):
    """dx[n d] of dy[n d]."""
    rows, width = dy.shape
    share = f32(1) / f32(width)
    for i in range(rows):
        projection = f32(0)
        for j in range(width):
            projection += dy[i, j] * scale[j] * normal[i, j]
        along, factor = projection * share, inverse[i]
        for j in range(width):
            dx[i, j] = (dy[i, j] * scale[j] - normal[i, j] * along) * factor


@compiled
def rms_norm_backward_scale(dy: Rows, normal: Rows, dscale: Vector):
    """Add the gradient of dy[n d] to dscale[d]."""
    rows, width = dy.shape
    for i in range(rows):
        for j in range(width):
            dscale[j] += dy[i, j] * normal[i, j]


# --- gates of flat z[n] and u[n]


@compiled
def silu_gate(z: Vector, u: Vector, h: Vector, of_gate: Vector, of_value: Vector):
    """h[n], and its slopes by z and by u."""
    for i in range(z.size):
        x = z[i]
        sigmoid = f32(1) / (f32(1) + exponential(-x))
        silu = x * sigmoid
        h[i] = silu * u[i]
        of_gate[i] = (sigmoid + silu * (f32(1) - sigmoid)) * u[i]
        of_value[i] = silu


@compiled
def silu_gate_value(z: Vector, u: Vector, h: Vector):
    """h[n]."""
    for i in range(z.size):
        h[i] = z[i] / (f32(1) + exponential(-z[i])) * u[i]


# --- rotary positions of x[n h k] at n positions, with cosines and sines [n p] of p pairs


@compiled
def rotate_halves(x: Blocks, cosine: Rows, sine: Rows, y: Blocks):
    """y[n h k]: pairs are (i, i + p), and what is beyond 2p stays."""
    rows, heads, width = x.shape
    pairs = cosine.shape[1]
    for i in range(rows):
        for h in range(heads):
            for j in range(pairs):
                first, second = x[i, h, j], x[i, h, j + pairs]
                y[i, h, j] = first * cosine[i, j] - second * sine[i, j]
                y[i, h, j + pairs] = second * cosine[i, j] + first * sine[i, j]
            for j in range(2 * pairs, width):
                y[i, h, j] = x[i, h, j]


@compiled
def rotate_neighbours(x: Blocks, cosine: Rows, sine: Rows, y: Blocks):
    """y[n h k]: pairs are (2i, 2i + 1), and what is beyond 2p stays."""
    rows, heads, width = x.shape
    pairs = cosine.shape[1]
    for i in range(rows):
        for h in range(heads):
            for j in range(pairs):
                first, second = x[i, h, 2 * j], x[i, h, 2 * j + 1]
                y[i, h, 2 * j] = first * cosine[i, j] - second * sine[i, j]
                y[i, h, 2 * j + 1] = second * cosine[i, j] + first * sine[i, j]
            for j in range(2 * pairs, width):
                y[i, h, j] = x[i, h, j]
