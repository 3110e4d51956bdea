"""Compiled loops over float32 arrays of what Llamas have: RMS norm, gated perceptrons, rotary positions.

As those of ``kernels``, in whose manner they are written.
"""

import numpy as np

from spmd_engine.arrays.numba.kernels import Blocks, Number, Rows, Vector, compiled, compiled_sums, exponential, f32

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
    """Add to dscale[d] that of dy[n d]."""
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
