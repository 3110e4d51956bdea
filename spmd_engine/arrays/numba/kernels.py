"""Loops over float32 arrays that Numba compiles: every chain of elementwise steps is one pass over memory.

A loop with ``Either`` arrays is compiled twice: for float32 and, as NAME_bfloat16, for bfloat16. It reads them by
``wide`` and writes them by ``stored``, which rounds; the numbers between are float32.

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

# What loops take: contiguous arrays of 1, 2, 3 and 4 dimensions, numbers, and tuples of them.
Vector, Rows, Blocks, Images = (types.Array(types.float32, dimensions, "C") for dimensions in (1, 2, 3, 4))
Flags, Indices = types.Array(types.boolean, 1, "C"), types.Array(types.int64, 1, "C")
Halves, HalfRows = (types.Array(types.int16, dimensions, "C") for dimensions in (1, 2))  # the bits of bfloat16
Number, Integer = types.float32, types.int64
Four, Factors = types.UniTuple(types.int64, 4), types.UniTuple(types.float32, 7)


@dataclass(frozen=True)
class Either:
    """Contiguous arrays of float32, or of the bits of bfloat16."""

    dimensions: int

    def of(self, half: bool) -> types.Array:
        return types.Array(types.int16 if half else types.float32, self.dimensions, "C")


AnyVector, AnyRows, AnyBlocks = Either(1), Either(2), Either(3)

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
def wide(context, number):
    """A number of an array, float32 or bfloat16, as float32."""

    def generate(_, builder, __, arguments):
        if number != types.int16:
            return arguments[0]
        bits = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.IntType(32)(16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(number), generate


@intrinsic
def stored(context, number, array):
    """A float32 as a number of this array: as bfloat16 rounded to nearest even; NaN stays NaN."""

    def generate(_, builder, __, arguments):
        word, (x, _) = ir.IntType(32), arguments
        if array.dtype != types.int16:
            return x
        bits = builder.bitcast(x, word)
        half = builder.lshr(bits, word(16))
        odd = builder.and_(half, word(1))
        even = builder.lshr(builder.add(bits, builder.add(odd, word(0x7FFF))), word(16))
        kept = builder.select(builder.fcmp_unordered("uno", x, x), builder.or_(half, word(0x40)), even)
        return builder.trunc(kept, ir.IntType(16))

    return array.dtype(types.float32, array), generate


@compiled
def add_halves(x: HalfRows, y: HalfRows):
    """x[n d] += y[n d], or y[1 d]."""
    rows, width = x.shape
    for i in range(rows):
        row = i if y.shape[0] > 1 else 0
        for j in range(width):
            x[i, j] = stored(wide(x[i, j]) + wide(y[row, j]), x)


@compiled
def multiply_halves(x: HalfRows, y: HalfRows):
    """x[n d] *= y[n d], or y[1 d]."""
    rows, width = x.shape
    for i in range(rows):
        row = i if y.shape[0] > 1 else 0
        for j in range(width):
            x[i, j] = stored(wide(x[i, j]) * wide(y[row, j]), x)


@compiled
def kept_where(x: AnyVector, flags: Flags, y: AnyVector):
    """y[n] = x[n] where flags[n], else 0."""
    for i in range(x.size):
        y[i] = stored(wide(x[i]) if flags[i] else f32(0), y)


@compiled
def round_to_bfloat16(x: Vector, y: Halves):
    """y[n] is x[n] rounded to nearest even; NaN stays NaN."""
    for i in range(x.size):
        y[i] = stored(x[i], y)


# --- activations of flat z[n]


@compiled
def relu(z: AnyVector, y: AnyVector, slope: Flags):
    """y[n] and slope[n] of z[n]."""
    for i in range(z.size):
        x = wide(z[i])
        y[i] = stored(f32(0) if x <= f32(0) else x, y)
        slope[i] = x > f32(0)


@compiled
def relu_value(z: AnyVector, y: AnyVector):
    """y[n] of z[n]."""
    for i in range(z.size):
        x = wide(z[i])
        y[i] = stored(f32(0) if x <= f32(0) else x, y)


@compiled
def gelu(z: AnyVector, y: AnyVector, slope: AnyVector):
    """y[n] and slope[n] of z[n]."""
    for i in range(z.size):
        x = wide(z[i])
        square = x * x
        gate = f32(1) / (f32(1) + exponential(-x * (f32(2 * GELU_C) + f32(2 * GELU_C * GELU_A) * square)))
        value = x * gate
        y[i] = stored(value, y)
        rise = gate + value * (f32(1) - gate) * (f32(2 * GELU_C) + f32(6 * GELU_C * GELU_A) * square)
        slope[i] = stored(rise, slope)


@compiled
def gelu_value(z: AnyVector, y: AnyVector):
    """y[n] of z[n]."""
    for i in range(z.size):
        x = wide(z[i])
        y[i] = stored(x / (f32(1) + exponential(-x * (f32(2 * GELU_C) + f32(2 * GELU_C * GELU_A) * x * x))), y)


# --- layer norm and RMS norm of rows[n d]


@njit(inline="always")
def _normalize(x, scale, shift, epsilon, y, normal, inverse, centred):
    """y[n d], normal[n d] and inverse[n] of x[n d]; the mean is 0, and there is no shift, unless ``centred``."""
    rows, width = x.shape
    share = f32(1) / f32(width)
    for i in range(rows):
        total = squares = f32(0)
        if centred:
            for j in range(width):
                total += wide(x[i, j])
        mean = total * share if centred else f32(0)
        for j in range(width):
            squares += (wide(x[i, j]) - mean) * (wide(x[i, j]) - mean)
        factor = f32(1) / np.sqrt(squares * share + epsilon)
        inverse[i] = factor
        for j in range(width):
            n = (wide(x[i, j]) - mean) * factor
            normal[i, j] = stored(n, normal)
            y[i, j] = stored(n * scale[j] + shift[j] if centred else n * scale[j], y)


@compiled_sums
def layer_norm(x: AnyRows, scale: Vector, shift: Vector, epsilon: Number, y: AnyRows, normal: AnyRows, inverse: Vector):
    """y[n d], normal[n d] and inverse[n] of x[n d]."""
    _normalize(x, scale, shift, epsilon, y, normal, inverse, True)


@compiled_sums
def rms_norm(x: AnyRows, scale: Vector, epsilon: Number, y: AnyRows, normal: AnyRows, inverse: Vector):
    """y[n d], normal[n d] and inverse[n] of x[n d]."""
    _normalize(x, scale, scale, epsilon, y, normal, inverse, False)


@njit(inline="always")
def _normalize_backward(dy, normal, inverse, scale, dx, centred):
    """dx[n d] of dy[n d], of a norm that is ``centred`` or not."""
    rows, width = dy.shape
    share = f32(1) / f32(width)
    for i in range(rows):
        total = projection = f32(0)
        for j in range(width):
            g = wide(dy[i, j]) * scale[j]
            total += g
            projection += g * wide(normal[i, j])
        mean, along, factor = total * share if centred else f32(0), projection * share, inverse[i]
        for j in range(width):
            dx[i, j] = stored((wide(dy[i, j]) * scale[j] - mean - wide(normal[i, j]) * along) * factor, dx)


@compiled_sums
def layer_norm_backward(dy: AnyRows, normal: AnyRows, inverse: Vector, scale: Vector, dx: AnyRows):
    """dx[n d] of dy[n d]."""
    _normalize_backward(dy, normal, inverse, scale, dx, True)


@compiled_sums
def rms_norm_backward(dy: AnyRows, normal: AnyRows, inverse: Vector, scale: Vector, dx: AnyRows):
    """dx[n d] of dy[n d]."""
    _normalize_backward(dy, normal, inverse, scale, dx, False)


@compiled
def layer_norm_backward_parameters(dy: AnyRows, normal: AnyRows, dscale: Vector, dshift: Vector):
    """Add the gradients of dy[n d] to dscale[d] and dshift[d]."""
    rows, width = dy.shape
    for i in range(rows):
        for j in range(width):
            dscale[j] += wide(dy[i, j]) * wide(normal[i, j])
            dshift[j] += wide(dy[i, j])


@compiled
def rms_norm_backward_scale(dy: AnyRows, normal: AnyRows, dscale: Vector):
    """Add the gradient of dy[n d] to dscale[d]."""
    rows, width = dy.shape
    for i in range(rows):
        for j in range(width):
            dscale[j] += wide(dy[i, j]) * wide(normal[i, j])


# --- optimizers of flat p[n]


@compiled
def adamw(p: Vector, g: Vector, mean: Vector, square: Vector, factors: Factors):
    """A step of p[n], mean[n] and square[n], in place, with the factors of ``adamw_factors``."""
    fresh, beta1, weight, beta2, epsilon, size, kept = factors
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
def softmax_over_keys(scores: Blocks, scale: Number, p: AnyBlocks, top: Rows, sums: Rows):
    """p[h t s] are exp(scale · scores - top[h s]), with the sums of these over t before they are rounded; ``top`` is a
    multiple of log(2)."""
    heads, keys, width = scores.shape
    to_powers, log_2 = scale * f32(1.44269504088896341), f32(0.693147180559945309)
    for h in range(heads):
        for j in range(width):
            top[h, j] = f32(-np.inf)
            sums[h, j] = f32(0)
        for t in range(keys):
            for j in range(width):
                x = scores[h, t, j]
                top[h, j] = x if x > top[h, j] or x != x else top[h, j]
        for j in range(width):
            above, highest = np.ceil(top[h, j] * to_powers) * log_2, top[h, j] * scale
            if highest > above + f32(1) or above > highest + f32(1):  # multiples of log(2) are rounded
                above = highest
            top[h, j] = f32(-3.4028234663852886e38) if above == f32(-np.inf) else above
        for t in range(keys):
            for j in range(width):
                x = exponential(scores[h, t, j] * scale - top[h, j])
                p[h, t, j] = stored(x, p)
                sums[h, j] += x


@compiled
def exponentiate_columns(scores: Blocks, scale: Number, shift: Rows, p: AnyBlocks):
    """scores[h t s] become exp(scale · scores - shift[h s]), and ``p`` too."""
    heads, keys, width = scores.shape
    for h in range(heads):
        for t in range(keys):
            for j in range(width):
                x = exponential(scores[h, t, j] * scale - shift[h, j])
                scores[h, t, j] = x
                p[h, t, j] = stored(x, p)


@compiled
def softmax_backward(ds: Blocks, p: Blocks, projection: Rows, scale: Number, y: AnyBlocks):
    """y[h t s] = (ds - projection[h s]) * p[h t s] * scale."""
    heads, keys, width = ds.shape
    for h in range(heads):
        for t in range(keys):
            for j in range(width):
                y[h, t, j] = stored((ds[h, t, j] - projection[h, j]) * (p[h, t, j] * scale), y)


@njit(fastmath={"contract", "arcp", "nsz"})  # rounded as in ``rotate_halves``, which is no sum
def _rotated(one, other, cosine, sine):
    return one * cosine - other * sine, other * cosine + one * sine


@compiled_sums
def attend_to_all(
    q: Rows,
    k: Rows,
    v: Rows,
    cosine: Rows,
    sine: Rows,
    apart: Integer,
    keys: Images,
    values: Images,
    first: Integer,
    end: Integer,
    scale: Number,
    scores: Vector,
    y: Rows,
):
    """Rotate the new keys k[b h k] and write them and v to column end - 1 of keys[b t h k] and values; then y[b h k] is
    the attention of the rotated queries q[b h k] to columns ``first`` to end - 1. The two numbers of a pair, which
    cosine[b p] and sine rotate, are ``apart`` places apart: 1, or p. ``scores`` are those of one query at a time."""
    batch, _, heads, width = keys.shape
    pairs, queries = cosine.shape[1], len(q) // (batch * heads)  # of each head
    step = 2 if apart == 1 else 1
    for row in range(len(k)):
        b, h = row // heads, row % heads
        for j in range(width):
            keys[b, end - 1, h, j], values[b, end - 1, h, j] = k[row, j], v[row, j]
        for i in range(pairs):
            j = step * i
            one, other = k[row, j], k[row, j + apart]
            keys[b, end - 1, h, j], keys[b, end - 1, h, j + apart] = _rotated(one, other, cosine[b, i], sine[b, i])
    for row in range(len(q)):
        b, h = row // (heads * queries), row // queries % heads
        for j in range(width):
            y[row, j] = q[row, j]
        for i in range(pairs):
            j = step * i
            one, other = q[row, j], q[row, j + apart]
            y[row, j], y[row, j + apart] = _rotated(one, other, cosine[b, i], sine[b, i])
        top, total = f32(-np.inf), f32(0)
        for t in range(first, end):
            x = f32(0)
            for j in range(width):
                x += y[row, j] * keys[b, t, h, j]
            x *= scale
            scores[t - first] = x
            top = x if x > top or x != x else top
        for j in range(width):
            y[row, j] = f32(0)
        for t in range(first, end):
            scores[t - first] = exponential(scores[t - first] - top)
            total += scores[t - first]
        for t in range(first, end):
            for j in range(width):
                y[row, j] += scores[t - first] * values[b, t, h, j]
        for j in range(width):
            y[row, j] /= total


@compiled_sums
def products_of_rows(x: AnyRows, y: AnyRows, sums: Vector):
    """sums[n] of x[n d] * y[n d] over d."""
    rows, width = x.shape
    for i in range(rows):
        total = f32(0)
        for j in range(width):
            total += wide(x[i, j]) * wide(y[i, j])
        sums[i] = total


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


# --- gates of flat z[n] and u[n]


@compiled
def silu_gate(z: AnyVector, u: AnyVector, h: AnyVector, of_gate: AnyVector, of_value: AnyVector):
    """h[n], and its slopes by z and by u."""
    for i in range(z.size):
        x = wide(z[i])
        sigmoid = f32(1) / (f32(1) + exponential(-x))
        silu = x * sigmoid
        h[i] = stored(silu * wide(u[i]), h)
        of_gate[i] = stored((sigmoid + silu * (f32(1) - sigmoid)) * wide(u[i]), of_gate)
        of_value[i] = stored(silu, of_value)


@compiled
def silu_gate_value(z: AnyVector, u: AnyVector, h: AnyVector):
    """h[n]."""
    for i in range(z.size):
        x = wide(z[i])
        h[i] = stored(x / (f32(1) + exponential(-x)) * wide(u[i]), h)


# --- rotary positions of x[n h k] at n positions, with cosines and sines [n p] of p pairs


@njit(inline="always")
def _rotate(x, cosine, sine, y, step, apart):
    """y[n h k], with one rotation for all h: pairs are (step i, step i + apart), and what is beyond 2p stays."""
    width, (positions, pairs) = x.shape[1], cosine.shape
    heads = len(x) // max(positions, 1)
    for i in range(positions):
        for h in range(i * heads, (i + 1) * heads):
            for j in range(pairs):
                first, second = wide(x[h, step * j]), wide(x[h, step * j + apart])
                y[h, step * j] = stored(first * cosine[i, j] - second * sine[i, j], y)
                y[h, step * j + apart] = stored(second * cosine[i, j] + first * sine[i, j], y)
            for j in range(2 * pairs, width):
                y[h, j] = x[h, j]


@compiled
def rotate_halves(x: AnyRows, cosine: Rows, sine: Rows, y: AnyRows):
    """Rotate the pairs (i, i + p)."""
    _rotate(x, cosine, sine, y, 1, cosine.shape[1])


@compiled
def rotate_neighbours(x: AnyRows, cosine: Rows, sine: Rows, y: AnyRows):
    """Rotate the pairs (2i, 2i + 1)."""
    _rotate(x, cosine, sine, y, 2, 1)
