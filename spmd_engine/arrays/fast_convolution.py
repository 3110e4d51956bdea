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


def _tile_product(vectors: int):
    """The product of which a tile is ``ROWS`` rows of so many vectors each."""
    wide = vectors * LANES

    @intrinsic
    def multiply(typing, a, rows, row, runs, length, step, b, place, y, places, first, start):
        """y[start + places[first + r] + j] = the sum over steps s = (run t) of

            a[rows[row + r] + runs[run] + t * step] * b[place + s * wide + j].

        All arrays are flat, r < ROWS, j < wide, t < length. No bounds are looked at.
        """
        number = types.intp
        signature = types.void(a, rows, number, runs, number, number, b, number, y, places, number, number)

        def generate(context, builder, signature, values):
            given = [
                context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
                for kind, value in zip(signature.args, values, strict=True)
            ]
            a, rows, row, runs, length, step, b, place, y, places, first, start = given
            single, integer, vector = ir.FloatType(), ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
            columns = range(0, wide, LANES)  # where the vectors of a row begin

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
            first_row = builder.gep(rows.data, [row])
            offsets = [builder.load(builder.gep(first_row, [integer(r)])) for r in range(ROWS)]
            left, right = variable(a.data), variable(builder.gep(b.data, [place]))
            (count,) = cgutils.unpack_tuple(builder, runs.shape, 1)
            with cgutils.for_range(builder, count) as run:
                begin = builder.load(builder.gep(runs.data, [run.index]))
                builder.store(builder.gep(a.data, [begin]), left)
                with cgutils.for_range(builder, length):
                    factors = [builder.load(vector_at(builder.load(right), j), align=4) for j in columns]
                    for r in range(ROWS):
                        value = spread(builder.load(builder.gep(builder.load(left), [offsets[r]])))
                        for total, factor in zip(sums[r], factors, strict=True):
                            product = builder.fmul(value, factor, flags=["contract"])
                            builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)
                    advance(left, step)
                    advance(right, integer(wide))
            at, onto = builder.gep(places.data, [first]), builder.gep(y.data, [start])
            for r in range(ROWS):
                to = builder.gep(onto, [builder.load(builder.gep(at, [integer(r)]))])
                for j, total in zip(columns, sums[r], strict=True):
                    builder.store(builder.load(total), vector_at(to, j), align=4)
            return context.get_dummy_value()

        return signature, generate

    return multiply


_multiply_wide, _multiply_narrow = _tile_product(2), _tile_product(1)


@njit(nogil=True)
def _multiply_tile(wide, a, rows, row, runs, length, step, b, place, y, places, first, start):
    """The product of a tile so wide."""
    if wide == WIDE:
        _multiply_wide(a, rows, row, runs, length, step, b, place, y, places, first, start)
    else:
        _multiply_narrow(a, rows, row, runs, length, step, b, place, y, places, first, start)


@njit(nogil=True)
def _copy_padded(x, samples, row, column, panel):
    """panel[b h w c] = x[samples + b, row + h, column + w, c], and 0 outside of x."""
    count, height, width, channels = panel.shape
    left = min(max(0, -column), width)
    right = max(left, min(width, x.shape[2] - column))
    source, target = x.reshape(-1), panel.reshape(-1)
    for b in range(count):
        for h in range(height):
            if not 0 <= row + h < x.shape[1]:
                panel[b, h] = f32(0)
                continue
            panel[b, h, :left] = f32(0)
            panel[b, h, right:] = f32(0)
            to = ((b * height + h) * width + left) * channels
            of = (((samples + b) * x.shape[1] + row + h) * x.shape[2] + column + left) * channels
            for i in range((right - left) * channels):
                target[to + i] = source[of + i]


@njit(nogil=True)
def _copy_some(source, of, target, to, count):
    """target[to + j] = source[of + j], j < count: of a number that is known a few vectors."""
    if count == WIDE:
        for j in range(WIDE):
            target[to + j] = source[of + j]
    elif count == LANES:
        for j in range(LANES):
            target[to + j] = source[of + j]
    else:
        for j in range(count):
            target[to + j] = source[of + j]


@njit(nogil=True)
def _block(outputs, room, limit):
    """How many samples, and rows of outputs, are worked on at a time, where a row takes ``room`` of ``limit``."""
    b, p, _, __ = outputs
    lines = max(1, limit // max(1, room))
    return min(b, max(1, lines // p)), min(p, lines)


@njit(nogil=True)
def _tap_offsets(rows, columns, width, channels, groups):
    """Where the taps of a patch begin, in a panel of this width; and how many numbers each is in one piece.

    Taps of a row that touch each other are one.
    """
    if columns[2] == 1 and groups == 1:
        return np.arange(rows[0]) * (rows[2] * width * channels), columns[0] * channels
    offsets = np.empty(rows[0] * columns[0], np.intp)
    for k in range(rows[0]):
        for l in range(columns[0]):
            offsets[k * columns[0] + l] = (k * rows[2] * width + l * columns[2]) * channels
    return offsets, channels // groups


@compiled
def correlate(x, w, y, outputs, strides, rows, columns, limit):
    """y[b p q (g o)] = sum over k, l, i of x[b h w (g i)] * w[g t (k l i) j], where o = (t j), j in a tile's width.

    ``y`` is flat memory; ``outputs`` are b, p, q, o; ``strides`` those of b, p, q in ``y``, and where it begins.
    """
    groups, tiles, inside, wide = w.shape
    channels, (b, p, q, o) = x.shape[3], outputs
    width = (q - 1) * columns[1] + (columns[0] - 1) * columns[2] + 1
    span = (rows[0] - 1) * rows[2] + 1
    samples, lines = _block(outputs, rows[1] * width * channels, limit)
    panel = np.empty((samples, (lines - 1) * rows[1] + span, width, channels), np.float32)
    runs, length = _tap_offsets(rows, columns, width, channels, groups)
    reads, writes = np.zeros(samples * lines * q + ROWS, np.intp), np.empty(samples * lines * q, np.intp)
    for m in range(writes.size):
        n, line, column = m // (lines * q), m // q % lines, m % q
        reads[m] = ((n * panel.shape[1] + line * rows[1]) * width + column * columns[1]) * channels
        writes[m] = n * strides[0] + line * strides[1] + column * strides[2] + strides[3]
    of_panel, right = panel.reshape(-1), w.reshape(-1)
    tile, in_tile = np.empty(ROWS * wide, np.float32), np.arange(ROWS) * wide
    for first in range(0, b, samples):
        for line in range(0, p, lines):
            patches = min(samples, b - first) * min(lines, p - line) * q
            place = first * strides[0] + line * strides[1]
            _copy_padded(x, first, line * rows[1] - rows[3], -columns[3], panel)
            for g in range(groups):
                left = of_panel[g * (channels // groups) :]
                for t in range(tiles):
                    weights, to, filled = (g * tiles + t) * inside * wide, place + g * o + t * wide, o - t * wide
                    for m in range(0, patches, ROWS):
                        if filled >= wide and m + ROWS <= patches:
                            _multiply_tile(wide, left, reads, m, runs, length, 1, right, weights, y, writes, m, to)
                            continue
                        _multiply_tile(wide, left, reads, m, runs, length, 1, right, weights, tile, in_tile, 0, 0)
                        for r in range(min(ROWS, patches - m)):
                            _copy_some(tile, r * wide, y, to + writes[m + r], min(wide, filled))


@compiled
def correlate_weights(x, dy, dw, rows, columns, limit):
    """Add to dw[g t (k l i) j] the sums over b, p, q of x[b h w (g i)] * dy[b p q (g o)], where o = (t j) as above."""
    groups, tiles, inside, wide = dw.shape
    channels, o, (b, p, q, f) = x.shape[3], dy.shape[3] // groups, dy.shape
    width = (q - 1) * columns[1] + (columns[0] - 1) * columns[2] + 1
    span = (rows[0] - 1) * rows[2] + 1
    samples, lines = _block(dy.shape, rows[1] * width * channels + q * wide, limit)
    panel = np.empty((samples, (lines - 1) * rows[1] + span, width, channels), np.float32)
    right = np.zeros(samples * lines * q * wide, np.float32)
    taps, length = _tap_offsets(rows, columns, width, channels, groups)
    reads, runs = np.zeros(inside + ROWS, np.intp), np.empty(samples * lines, np.intp)
    for m in range(inside):
        reads[m] = taps[m // length] + m % length
    for m in range(runs.size):
        runs[m] = (m // lines * panel.shape[1] + m % lines * rows[1]) * width * channels
    of_panel, of_dy, step = panel.reshape(-1), dy.reshape(-1), columns[1] * channels
    tile, in_tile = np.empty(ROWS * wide, np.float32), np.arange(ROWS) * wide
    for first in range(0, b, samples):
        for line in range(0, p, lines):
            count, height = min(samples, b - first), min(lines, p - line)
            of_block = runs[: count * height]
            _copy_padded(x, first, line * rows[1] - rows[3], -columns[3], panel)
            for g in range(groups):
                left = of_panel[g * (channels // groups) :]
                for t in range(tiles):
                    filled = min(wide, o - t * wide)
                    for n in range(count):
                        for v in range(height * q):
                            of = ((first + n) * p + line) * q + v
                            _copy_some(of_dy, of * f + g * o + t * wide, right, (n * height * q + v) * wide, filled)
                    for m in range(0, inside, ROWS):
                        _multiply_tile(wide, left, reads, m, of_block, q, step, right, 0, tile, in_tile, 0, 0)
                        for r in range(min(ROWS, inside - m)):
                            for j in range(wide):
                                dw[g, t, m + r, j] += tile[r * wide + j]
