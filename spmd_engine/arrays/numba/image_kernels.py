"""Loops over float32 images that Numba compiles."""

# pyright: reportInvalidTypeForm=false, reportCallIssue=false
# The annotations of a loop are types of Numba, which adds the first argument of an intrinsic.

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from spmd_engine.arrays.numba.kernels import (
    AnyRows,
    Blocks,
    Four,
    Images,
    Indices,
    Integer,
    Rows,
    Vector,
    compiled,
    f32,
    stored,
    wide,
)  # fmt: skip
from spmd_engine.arrays.numba.places import LANES, ROWS, WIDE


def _tile_product(vectors: int):
    """The product of a tile of ``ROWS`` rows with this number of ``vectors`` each."""
    wide = vectors * LANES

    @intrinsic
    def multiply(typing, a, rows, row, runs, length, step, b, place, y, places, first, start):
        """y[start + places[first + r] + j] = the sum over steps s = (run t) of

            a[rows[row + r] + runs[run] + t * step] * b[place + s * wide + j].

        All arrays are flat, r < ROWS, j < wide, t < length. Bounds are not checked.
        """
        number = types.intp
        signature = types.void(a, rows, number, runs, number, number, b, number, y, places, number, number)

        def generate(context, builder, signature, values):
            arguments = [
                context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
                for kind, value in zip(signature.args, values, strict=True)
            ]
            a, rows, row, runs, length, step, b, place, y, places, first, start = arguments
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


@intrinsic
def _flat(typing, x):
    """A flat view of ``x``. Numba's ``reshape`` is a call of its library."""
    row = types.Array(x.dtype, 1, "C")

    def generate(context, builder, signature, values):
        array, flat = context.make_array(x)(context, builder, values[0]), context.make_array(row)(context, builder)
        shape, strides = [array.nitems], [array.itemsize]
        populate_array(flat, data=array.data, shape=shape, strides=strides, itemsize=array.itemsize, meminfo=None)
        return flat._getvalue()

    return row(x), generate


@njit
def _multiply_tile(wide, a, rows, row, runs, length, step, b, place, y, places, first, start):
    """The product of a tile of ``wide`` columns."""
    if wide == WIDE:
        _multiply_wide(a, rows, row, runs, length, step, b, place, y, places, first, start)
    else:
        _multiply_narrow(a, rows, row, runs, length, step, b, place, y, places, first, start)


@njit
def _copy_padded(x, samples, row, column, panel):
    """panel[b h w c] = x[samples + b, row + h, column + w, c], and 0 outside of x."""
    count, height, width, channels = panel.shape
    left = min(max(0, -column), width)
    right = max(left, min(width, x.shape[2] - column))
    source, target = _flat(x), _flat(panel)
    for b in range(count):
        for h in range(height):
            line = (b * height + h) * width
            begin, end = line + left, line + right
            if not 0 <= row + h < x.shape[1]:
                end = begin = line + width
            for i in range(line * channels, begin * channels):
                target[i] = f32(0)
            start = (((samples + b) * x.shape[1] + row + h) * x.shape[2] + column + left) * channels
            for i in range((end - begin) * channels):
                target[begin * channels + i] = source[start + i]
            for i in range(end * channels, (line + width) * channels):
                target[i] = f32(0)


@njit
def _copy_some(source, of, target, to, count):
    """target[to + j] = source[of + j], j < count: a few vectors for two constant counts."""
    if count == WIDE:
        for j in range(WIDE):
            target[to + j] = source[of + j]
    elif count == LANES:
        for j in range(LANES):
            target[to + j] = source[of + j]
    else:
        for j in range(count):
            target[to + j] = source[of + j]


@compiled
def correlate(
    x: Images,
    w: Images,
    y: Vector,
    outputs: Four,
    strides: Four,
    rows: Four,
    columns: Four,
    panel: Images,
    tile: Vector,
    lines: Integer,
    reads: Indices,
    runs: Indices,
    length: Integer,
    writes: Indices,
    in_tile: Indices,
):
    """y[b p q (g o)] = sum over k, l, i of x[b h w (g i)] * w[g t (k l i) j], where o = (t j), j in a tile's width.

    ``y`` is flat memory; ``outputs`` are b, p, q, o; ``strides`` those of b, p, q in ``y``, and its offset. ``panel``
    and ``tile`` are scratch memory; the arguments from ``lines`` on are those of ``places_of_outputs``.
    """
    groups, tiles, inside, wide = w.shape
    channels, (b, p, q, o), samples = x.shape[3], outputs, panel.shape[0]
    flat_panel, right = _flat(panel), _flat(w)
    for first in range(0, b, samples):
        for line in range(0, p, lines):
            patches = min(samples, b - first) * min(lines, p - line) * q
            place = first * strides[0] + line * strides[1]
            _copy_padded(x, first, line * rows[1] - rows[3], -columns[3], panel)
            for g in range(groups):
                left = flat_panel[g * (channels // groups) :]
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
def correlate_weights(
    x: Images,
    dy: Images,
    dw: Images,
    rows: Four,
    columns: Four,
    panel: Images,
    tile: Vector,
    right: Vector,
    lines: Integer,
    reads: Indices,
    runs: Indices,
    length: Integer,
    writes: Indices,
    in_tile: Indices,
):
    """Add to dw[g t (k l i) j] the sums over b, p, q of x[b h w (g i)] * dy[b p q (g o)], where o = (t j) as above.

    With ``places_of_taps``. ``right`` is scratch memory for some columns of dy, and holds 0.
    """
    groups, tiles, inside, wide = dw.shape
    channels, o, (b, p, q, f), samples = x.shape[3], dy.shape[3] // groups, dy.shape, panel.shape[0]
    flat_panel, flat_dy, step = _flat(panel), _flat(dy), columns[1] * channels
    for first in range(0, b, samples):
        for line in range(0, p, lines):
            count, height = min(samples, b - first), min(lines, p - line)
            block_runs = runs[: count * height]
            _copy_padded(x, first, line * rows[1] - rows[3], -columns[3], panel)
            for g in range(groups):
                left = flat_panel[g * (channels // groups) :]
                for t in range(tiles):
                    filled = min(wide, o - t * wide)
                    for n in range(count):
                        for v in range(height * q):
                            row = ((first + n) * p + line) * q + v
                            _copy_some(flat_dy, row * f + g * o + t * wide, right, (n * height * q + v) * wide, filled)
                    for m in range(0, inside, ROWS):
                        _multiply_tile(wide, left, reads, m, block_runs, length, step, right, 0, tile, in_tile, 0, 0)
                        for r in range(min(ROWS, inside - m)):
                            for j in range(wide):
                                dw[g, t, m + r, j] += tile[r * wide + j]


# --- Loops of batch normalisation, pooling and depthwise convolutions over float32 images


SUMMED = 1024


@compiled
def channel_sums(x: AnyRows, some: Vector, sums: Vector):
    """Add the sums of x[n c] over n to sums[c]."""
    for first in range(0, len(x), SUMMED):
        for c in range(sums.size):
            some[c] = f32(0)
        for n in range(first, min(first + SUMMED, len(x))):
            for c in range(sums.size):
                some[c] += wide(x[n, c])
        for c in range(sums.size):
            sums[c] += some[c]


@compiled
def channel_squares(x: AnyRows, mean: Vector, some: Vector, squares: Vector):
    """Add the sums of (x[n c] - mean[c])^2 over n to squares[c]."""
    for first in range(0, len(x), SUMMED):
        for c in range(squares.size):
            some[c] = f32(0)
        for n in range(first, min(first + SUMMED, len(x))):
            for c in range(squares.size):
                some[c] += (wide(x[n, c]) - mean[c]) * (wide(x[n, c]) - mean[c])
        for c in range(squares.size):
            squares[c] += some[c]


@compiled
def scale_channels(x: AnyRows, mean: Vector, factor: Vector, shift: Vector, y: AnyRows):
    """y[n c] = (x[n c] - mean[c]) * factor[c] + shift[c]."""
    for n in range(len(x)):
        for c in range(mean.size):
            y[n, c] = stored((wide(x[n, c]) - mean[c]) * factor[c] + shift[c], y)


@compiled
def channel_gradients(dy: AnyRows, x: AnyRows, mean: Vector, some: Rows, sums: Rows):
    """Add the sums over n of dy[n c] * (x[n c] - mean[c]) to sums[0, c], and those of dy to sums[1, c]."""
    for first in range(0, len(x), SUMMED):
        for c in range(mean.size):
            some[0, c] = f32(0)
            some[1, c] = f32(0)
        for n in range(first, min(first + SUMMED, len(x))):
            for c in range(mean.size):
                some[0, c] += wide(dy[n, c]) * (wide(x[n, c]) - mean[c])
                some[1, c] += wide(dy[n, c])
        for c in range(mean.size):
            sums[0, c] += some[0, c]
            sums[1, c] += some[1, c]


@compiled
def normalized_gradient(
    dy: AnyRows, x: AnyRows, mean: Vector, along: Vector, shift: Vector, factor: Vector, dx: AnyRows
):
    """dx[n c] = (dy[n c] - shift[c] - (x[n c] - mean[c]) * along[c]) * factor[c]."""
    for n in range(len(x)):
        for c in range(mean.size):
            dx[n, c] = stored((wide(dy[n, c]) - shift[c] - (wide(x[n, c]) - mean[c]) * along[c]) * factor[c], dx)


# --- Loops of pooling and depthwise convolutions over float32 images that Numba compiles: channels do not mix
#
# They are written as those of ``kernels``. A window is the tuple (size, stride, dilation, before).


Taps = types.Array(types.uint8, 4, "C")


@njit(inline="always")
def _read(output, tap, window):
    """Which input a tap of an output's window reads; it may be padding."""
    return output * window[1] + tap * window[2] - window[3]


@compiled
def max_pool(x: Images, rows: Four, columns: Four, y: Images, chosen: Taps):
    """y[b p q c] and chosen[b p q c] of x[b h w c]; ``y`` holds -inf and ``chosen`` 0."""
    samples, height, width, channels = y.shape
    for b in range(samples):
        for p in range(height):
            for q in range(width):
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                            tap = k * columns[0] + l
                            for c in range(channels):
                                value, best = x[b, h, w, c], y[b, p, q, c]
                                greater = value > best or value != value
                                y[b, p, q, c] = value if greater else best
                                chosen[b, p, q, c] = tap if greater else chosen[b, p, q, c]


@compiled
def max_pool_gradient(dy: Images, chosen: Taps, rows: Four, columns: Four, dx: Images):
    """Add to dx[b h w c] the gradients dy[b p q c] of the chosen inputs."""
    samples, height, width, channels = dy.shape
    for b in range(samples):
        for p in range(height):
            for q in range(width):
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < dx.shape[1] and 0 <= w < dx.shape[2]:
                            tap = k * columns[0] + l
                            for c in range(channels):
                                dx[b, h, w, c] += dy[b, p, q, c] if chosen[b, p, q, c] == tap else f32(0)


@compiled
def depthwise(x: Images, factors: Blocks, rows: Four, columns: Four, y: Images):
    """Add to y[b p q c] the sums over k, l of x[b h w c] * factors[k l c]."""
    samples, height, width, channels = y.shape
    for b in range(samples):
        for p in range(height):
            for q in range(width):
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                            for c in range(channels):
                                y[b, p, q, c] += x[b, h, w, c] * factors[k, l, c]


@compiled
def depthwise_input(dy: Images, factors: Blocks, rows: Four, columns: Four, dx: Images):
    """Add to dx[b h w c] the gradients dy[b p q c] * factors[k l c]."""
    samples, height, width, channels = dy.shape
    for b in range(samples):
        for p in range(height):
            for q in range(width):
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < dx.shape[1] and 0 <= w < dx.shape[2]:
                            for c in range(channels):
                                dx[b, h, w, c] += dy[b, p, q, c] * factors[k, l, c]


@compiled
def depthwise_weights(x: Images, dy: Images, rows: Four, columns: Four, of_row: Blocks, dw: Blocks):
    """Add to dw[k l c] the sums over b, p, q of x[b h w c] * dy[b p q c].

    Rows are summed first, in ``of_row``: a sequential sum of a million numbers would lose two more digits.
    """
    samples, height, width, channels = dy.shape
    for b in range(samples):
        for p in range(height):
            for k in range(rows[0]):
                for l in range(columns[0]):
                    for c in range(channels):
                        of_row[k, l, c] = f32(0)
            for q in range(width):
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                            for c in range(channels):
                                of_row[k, l, c] += x[b, h, w, c] * dy[b, p, q, c]
            for k in range(rows[0]):
                for l in range(columns[0]):
                    for c in range(channels):
                        dw[k, l, c] += of_row[k, l, c]
