"""Loops of convolutions over float32 images that Numba compiles; imported only where it is installed.

A convolution is a matrix product whose left matrix, the patches, is never made: ``_multiply_tile`` reads a patch where
it lies, in an image that was copied with its padding. The tile of the product that it works on stays in registers. It
is written in LLVM's own vectors, since no loop of Numba's is compiled into one that keeps a tile there.

A window comes as the tuple (size, stride, dilation, before).
"""

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from spmd_engine.arrays.fast_kernels import compiled, f32


def _tile() -> tuple[int, int]:
    """Rows and lanes: two vectors of this processor a row, as many rows as its registers hold beside their factors."""
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 12, 16
    return (6, 8) if features.get("avx") else (12, 4)


ROWS, LANES = _tile()
WIDE = 2 * LANES  # columns of a tile
PANEL_ELEMENTS = 1 << 17  # of the copied images at a time: 512 KiB, so that they stay in the L2 cache


@intrinsic
def _multiply_tile(typing, a, rows, row, runs, length, step, b, place, tile):
    """tile[r j] = the sum over steps s = (run t) of a[rows[row + r] + runs[run] + t * step] * b[place + s * WIDE + j].

    ``a``, ``b``, ``rows`` and ``runs`` are flat, and t < length. No bounds are looked at.
    """
    number = types.intp
    signature = types.void(a, rows, number, runs, number, number, b, number, tile)

    def generate(context, builder, signature, values):
        given = [
            context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, values, strict=True)
        ]
        a, rows, row, runs, length, step, b, place, tile = given
        single, integer, vector = ir.FloatType(), ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
        columns = range(0, WIDE, LANES)  # where the vectors of a row begin

        def vector_at(pointer, j):
            return builder.bitcast(builder.gep(pointer, [integer(j)]), vector.as_pointer())

        def variable(value):
            pointer = cgutils.alloca_once(builder, value.type)  # LLVM keeps it in a register
            builder.store(value, pointer)
            return pointer

        def advance(pointer, numbers):
            builder.store(builder.gep(builder.load(pointer), [numbers]), pointer)

        def spread(value):
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, integer(0))
            return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))

        sums = [[variable(ir.Constant(vector, [single(0)] * LANES)) for _ in columns] for _ in range(ROWS)]
        first = builder.gep(rows.data, [row])
        offsets = [builder.load(builder.gep(first, [integer(r)])) for r in range(ROWS)]
        left, right = variable(a.data), variable(builder.gep(b.data, [place]))
        (count,) = cgutils.unpack_tuple(builder, runs.shape, 1)
        with cgutils.for_range(builder, count) as run:
            start = builder.load(builder.gep(runs.data, [run.index]))
            builder.store(builder.gep(a.data, [start]), left)
            with cgutils.for_range(builder, length):
                factors = [builder.load(vector_at(builder.load(right), j), align=4) for j in columns]
                for r in range(ROWS):
                    value = spread(builder.load(builder.gep(builder.load(left), [offsets[r]])))
                    for total, factor in zip(sums[r], factors, strict=True):
                        product = builder.fmul(value, factor, flags=["contract"])
                        builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)
                advance(left, step)
                advance(right, integer(WIDE))
        for r in range(ROWS):
            for j, total in zip(columns, sums[r], strict=True):
                builder.store(builder.load(total), vector_at(tile.data, r * WIDE + j), align=4)
        return context.get_dummy_value()

    return signature, generate


@njit(nogil=True)
def _copy_padded(x, samples, row, column, channel, panel):
    """panel[b h w i] = x[samples + b, row + h, column + w, channel + i], and 0 outside of x."""
    count, height, width, channels = panel.shape
    left = min(max(0, -column), width)
    right = max(left, min(width, x.shape[2] - column))
    for b in range(count):
        for h in range(height):
            if not 0 <= row + h < x.shape[1]:
                panel[b, h] = f32(0)
                continue
            panel[b, h, :left] = f32(0)
            panel[b, h, right:] = f32(0)
            for w in range(left, right):
                for i in range(channels):
                    panel[b, h, w, i] = x[samples + b, row + h, column + w, channel + i]


@njit(nogil=True)
def _block(outputs, room, limit):
    """How many samples, and rows of outputs, are worked on at a time, where a row takes ``room`` of ``limit``."""
    b, p, _, __ = outputs
    lines = max(1, limit // max(1, room))
    return min(b, max(1, lines // p)), min(p, lines)


@njit(nogil=True)
def _tap_offsets(rows, columns, width, channels):
    """Where the taps of a patch begin, in a panel of this width; and how many numbers each is in one piece.

    Taps of a row that touch each other are one.
    """
    if columns[2] == 1:
        return np.arange(rows[0]) * (rows[2] * width * channels), columns[0] * channels
    offsets = np.empty(rows[0] * columns[0], np.intp)
    for k in range(rows[0]):
        for l in range(columns[0]):
            offsets[k * columns[0] + l] = (k * rows[2] * width + l * columns[2]) * channels
    return offsets, channels


@compiled
def correlate(x, w, y, outputs, strides, rows, columns, limit):
    """y[b p q (g o)] = sum over k, l, i of x[b h w (g i)] * w[g t (k l i) j], where o = (t j) and j < WIDE.

    ``y`` is flat memory; ``outputs`` are b, p, q, o; ``strides`` those of b, p, q in ``y``, and where it begins.
    """
    groups, tiles, inside = w.shape[0], w.shape[1], w.shape[2]
    channels, (b, p, q, o) = x.shape[3] // groups, outputs
    width = (q - 1) * columns[1] + (columns[0] - 1) * columns[2] + 1
    span = (rows[0] - 1) * rows[2] + 1
    samples, lines = _block(outputs, rows[1] * width * channels, limit)
    panel = np.empty((samples, (lines - 1) * rows[1] + span, width, channels), np.float32)
    runs, length = _tap_offsets(rows, columns, width, channels)
    reads, writes = np.zeros(samples * lines * q + ROWS, np.intp), np.empty(samples * lines * q, np.intp)
    for m in range(writes.size):
        n, line, column = m // (lines * q), m // q % lines, m % q
        reads[m] = ((n * panel.shape[1] + line * rows[1]) * width + column * columns[1]) * channels
        writes[m] = n * strides[0] + line * strides[1] + column * strides[2] + strides[3]
    left, right, tile = panel.reshape(-1), w.reshape(-1), np.empty((ROWS, WIDE), np.float32)
    for first in range(0, b, samples):
        for line in range(0, p, lines):
            patches = min(samples, b - first) * min(lines, p - line) * q
            place = first * strides[0] + line * strides[1]
            for g in range(groups):
                _copy_padded(x, first, line * rows[1] - rows[3], -columns[3], g * channels, panel)
                for t in range(tiles):
                    filled = min(WIDE, o - t * WIDE)
                    for m in range(0, patches, ROWS):
                        weights = (g * tiles + t) * inside * WIDE
                        _multiply_tile(left, reads, m, runs, length, 1, right, weights, tile)
                        for r in range(min(ROWS, patches - m)):
                            to = place + writes[m + r] + g * o + t * WIDE
                            if filled == WIDE:  # a loop of known length is a few vectors
                                for j in range(WIDE):
                                    y[to + j] = tile[r, j]
                            else:
                                for j in range(filled):
                                    y[to + j] = tile[r, j]


@compiled
def correlate_weights(x, dy, dw, rows, columns, limit):
    """Add to dw[g t (k l i) j] the sums over b, p, q of x[b h w (g i)] * dy[b p q (g o)], where o = (t j), j < WIDE."""
    groups, tiles, inside = dw.shape[0], dw.shape[1], dw.shape[2]
    channels, o, (b, p, q, _) = x.shape[3] // groups, dy.shape[3] // groups, dy.shape
    width = (q - 1) * columns[1] + (columns[0] - 1) * columns[2] + 1
    span = (rows[0] - 1) * rows[2] + 1
    samples, lines = _block(dy.shape, rows[1] * width * channels + q * WIDE, limit)
    panel = np.empty((samples, (lines - 1) * rows[1] + span, width, channels), np.float32)
    right = np.zeros((samples * lines * q, WIDE), np.float32)
    taps, length = _tap_offsets(rows, columns, width, channels)
    reads, runs = np.zeros(inside + ROWS, np.intp), np.empty(samples * lines, np.intp)
    for m in range(inside):
        reads[m] = taps[m // length] + m % length
    for m in range(runs.size):
        runs[m] = (m // lines * panel.shape[1] + m % lines * rows[1]) * width * channels
    left, factors, tile = panel.reshape(-1), right.reshape(-1), np.empty((ROWS, WIDE), np.float32)
    for first in range(0, b, samples):
        for line in range(0, p, lines):
            count, height = min(samples, b - first), min(lines, p - line)
            of_block = runs[: count * height]
            for g in range(groups):
                _copy_padded(x, first, line * rows[1] - rows[3], -columns[3], g * channels, panel)
                for t in range(tiles):
                    filled = min(WIDE, o - t * WIDE)
                    for n in range(count):
                        for h in range(height):
                            for v in range(q):
                                for j in range(filled):
                                    value = dy[first + n, line + h, v, g * o + t * WIDE + j]
                                    right[(n * height + h) * q + v, j] = value
                    for m in range(0, inside, ROWS):
                        step = columns[1] * channels
                        _multiply_tile(left, reads, m, of_block, q, step, factors, 0, tile)
                        for r in range(min(ROWS, inside - m)):
                            for j in range(WIDE):
                                dw[g, t, m + r, j] += tile[r, j]
