"""Convolutions, pooling and normalised channels as calls of compiled loops, for float32 images on the host."""

from __future__ import annotations

from importlib import import_module
from math import gcd, prod

import numpy as np
from ml_dtypes import bfloat16

from spmd_engine.arrays.numba.functions import compiled_loops, contiguous, loop_for
from spmd_engine.arrays.windows import Window, check_convolution, check_gradient, outputs_of

_OF_BFLOAT16 = {"channel_sums", "channel_squares", "scale_channels", "channel_gradients", "normalized_gradient"}


def fast_images() -> FastImages | None:
    """The compiled functions of images, or None as ``fast_functions``."""
    loops = compiled_loops("image_kernels")
    return FastImages(loops, import_module("spmd_engine.arrays.numba.places")) if loops else None


class FastImages:
    """Each function has the name, signature and result of its NumPy version, which is documented."""

    def __init__(self, loops, places) -> None:
        """``places`` is the module of this name, which is imported only if loops are available."""
        self._loops, self._places = loops, places

    def takes(self, dtype: np.dtype, name: str = "") -> bool:
        """Float32, and bfloat16 for functions of channels, as ``FastFunctions``."""
        return dtype == np.float32 or (dtype == bfloat16 and name in _OF_BFLOAT16)

    # Convolution

    def conv2d(self, x, w, rows, columns, groups=1):
        check_convolution(x.shape, w.shape, rows, columns, groups)
        x, w = _contiguous(x), _contiguous(w)
        shape = outputs_of(x.shape, rows, columns, w.shape[3])
        if _is_depthwise(w.shape, groups):
            y = np.zeros_like(x, np.float32, shape=shape)
            self._loops.depthwise(x, w[:, :, 0], *_numbers(rows), *_numbers(columns), y)
            return y
        if (m := side_by_side(groups, w.shape[3] // groups, self._places.LANES)) > 1:
            return self.conv2d(x, joined(w, groups, m), rows, columns, groups // m)
        y = np.empty_like(x, np.float32, shape=shape)
        o = shape[3] // groups
        weights = self._tiles(w.reshape(*w.shape[:3], groups, o).transpose(3, 0, 1, 2, 4))
        self._correlate(x, weights, y, (*shape[:3], o), (0, 0), (1, 1), rows, columns)
        return y

    def conv2d_input_gradient(self, dy, w, rows, columns, groups, lengths):
        b, (h, width), (k, l, i, f) = dy.shape[0], lengths, w.shape
        dx = np.zeros_like(dy, np.float32, shape=(b, h, width, i * groups))
        check_convolution(dx.shape, w.shape, rows, columns, groups)
        check_gradient(dy.shape, dx.shape, rows, columns, f)
        dy, w = _contiguous(dy), _contiguous(w)
        if _is_depthwise(w.shape, groups):
            self._loops.depthwise_input(dy, w[:, :, 0], *_numbers(rows), *_numbers(columns), dx)
            return dx
        if (m := side_by_side(groups, i, self._places.LANES)) > 1:
            return self.conv2d_input_gradient(dy, joined(w, groups, m), rows, columns, groups // m, lengths)
        w = w.reshape(k, l, i, groups, f // groups).transpose(3, 0, 1, 4, 2)
        for row in range(min(h, rows.stride)):
            for column in range(min(width, columns.stride)):
                (row_taps, rows_back), (column_taps, columns_back) = _backward(rows, row), _backward(columns, column)
                if row_taps and column_taps:
                    weights = self._tiles(w[:, row_taps, column_taps])
                    strides = rows.stride, columns.stride
                    outputs = b, -(-(h - row) // strides[0]), -(-(width - column) // strides[1]), i
                    self._correlate(dy, weights, dx, outputs, (row, column), strides, rows_back, columns_back)
        return dx

    def conv2d_weight_gradient(self, x, dy, rows, columns, groups):
        k, l, i, f = shape = rows.size, columns.size, x.shape[3] // groups, dy.shape[3]
        check_convolution(x.shape, shape, rows, columns, groups)
        check_gradient(dy.shape, x.shape, rows, columns, f)
        x, dy = _contiguous(x), _contiguous(dy)
        if _is_depthwise(shape, groups):
            dw = np.zeros_like(x, np.float32, shape=(k, l, f))
            self._loops.depthwise_weights(x, dy, *_numbers(rows), *_numbers(columns), np.empty_like(dw), dw)
            return dw[:, :, None]
        if (m := side_by_side(groups, f // groups, self._places.LANES)) > 1:
            return parted(self.conv2d_weight_gradient(x, dy, rows, columns, groups // m), groups, m)
        o = f // groups
        wide = self._width_of_tiles(o)
        tiles = -(-o // wide)
        dw = np.zeros_like(x, np.float32, shape=(groups, tiles, k * l * i, wide))
        if dy.size and dw.size:
            windows = _numbers(rows), _numbers(columns)
            places = self._places.places_of_taps(
                dy.shape, x.shape[3], groups, wide, *windows, self._places.PANEL_ELEMENTS
            )
            right = np.zeros_like(x, np.float32, shape=places.panel[0] * places.lines * dy.shape[2] * wide)
            memory = self._panel_and_tile(x, places)
            self._loops.correlate_weights(x, dy, dw, *windows[0], *windows[1], *memory, right, *places[1:])
        dw = dw.transpose(2, 0, 1, 3).reshape(k * l * i, groups, tiles * wide)
        return _contiguous(dw[:, :, :o]).reshape(shape)

    def _width_of_tiles(self, outputs):
        """The columns of a tile: narrow ones, of one vector, for outputs that would leave much of wide ones empty."""
        lanes = self._places.LANES
        return lanes if -(-outputs // lanes) in (1, 3) else self._places.WIDE

    def _tiles(self, weights):
        """weights[g k l i o] as [g t (k l i) j], where o = (t j) and j is as wide as a tile, padded with 0."""
        (groups, *inside, o), wide = weights.shape, self._width_of_tiles(weights.shape[4])
        tiles = -(-o // wide)
        if o % wide:
            filled = np.zeros_like(weights, np.float32, shape=(groups, *inside, tiles * wide))
            filled[..., :o] = weights
            weights = filled
        weights = weights.reshape(groups, *inside, tiles, wide).transpose(0, 4, 1, 2, 3, 5)
        return _contiguous(weights).reshape(groups, tiles, prod(inside), wide)

    def _correlate(self, x, weights, y, outputs, first, step, rows, columns):
        """Write ``outputs``, [b p q o] of each group, to y[:, first::step, first::step]."""
        if y.size and prod(outputs):
            column = y.shape[3]
            row, sample = y.shape[2] * column, y.shape[1] * y.shape[2] * column
            strides = sample, step[0] * row, step[1] * column, first[0] * row + first[1] * column
            groups, _, _, wide = weights.shape
            windows = _numbers(rows), _numbers(columns)
            places = self._places.places_of_outputs(
                outputs, strides, x.shape[3], groups, wide, *windows, self._places.PANEL_ELEMENTS
            )
            numbers = *outputs, *strides, *windows[0], *windows[1]
            memory = self._panel_and_tile(x, places)
            self._loops.correlate(x, weights, y.reshape(y.size), *numbers, *memory, *places[1:])

    def _panel_and_tile(self, x, places):
        """Scratch memory of the loops."""
        sizes = places.panel, self._places.ROWS * self._places.WIDE
        return [np.empty_like(x, np.float32, shape=size) for size in sizes]

    # Pooling

    def max_pool(self, x, rows, columns):
        if rows.size * columns.size > 256:  # more taps than a byte counts
            return NotImplemented
        y = np.full_like(x, -np.inf, np.float32, shape=outputs_of(x.shape, rows, columns, x.shape[3]))
        chosen = np.zeros_like(y, np.uint8)
        self._loops.max_pool(_contiguous(x), *_numbers(rows), *_numbers(columns), y, chosen)
        return y, chosen

    def max_pool_gradient(self, dy, chosen, rows, columns, lengths):
        if rows.size * columns.size > 256:
            return NotImplemented
        dx = np.zeros_like(dy, np.float32, shape=(dy.shape[0], *lengths, dy.shape[3]))
        check_gradient(dy.shape, dx.shape, rows, columns, dy.shape[3])
        chosen = np.broadcast_to(chosen, dy.shape).astype(chosen.dtype, order="C", copy=False)
        self._loops.max_pool_gradient(_contiguous(dy), chosen, *_numbers(rows), *_numbers(columns), dx)
        return dx

    def window_sums(self, x, rows, columns):
        y = np.zeros_like(x, np.float32, shape=outputs_of(x.shape, rows, columns, x.shape[3]))
        ones = np.ones_like(x, np.float32, shape=(rows.size, columns.size, x.shape[3]))
        self._loops.depthwise(_contiguous(x), ones, *_numbers(rows), *_numbers(columns), y)
        return y

    def window_sums_gradient(self, dy, rows, columns, lengths):
        dx = np.zeros_like(dy, np.float32, shape=(dy.shape[0], *lengths, dy.shape[3]))
        check_gradient(dy.shape, dx.shape, rows, columns, dy.shape[3])
        ones = np.ones_like(dy, np.float32, shape=(rows.size, columns.size, dy.shape[3]))
        self._loops.depthwise_input(_contiguous(dy), ones, *_numbers(rows), *_numbers(columns), dx)
        return dx

    # Channels

    def channel_sums(self, x):
        sums = np.zeros_like(x, np.float32, shape=x.shape[-1])
        loop_for(self._loops, "channel_sums", x)(_rows(x), np.empty_like(sums), sums)
        return sums

    def channel_squares(self, x, mean):
        squares = np.zeros_like(x, np.float32, shape=x.shape[-1])
        loop_for(self._loops, "channel_squares", x)(_rows(x), *_of_channels(x, mean), np.empty_like(squares), squares)
        return squares

    def scale_channels(self, x, mean, factor, shift):
        y = np.empty_like(x, order="C")
        loop_for(self._loops, "scale_channels", x)(_rows(x), *_of_channels(x, mean, factor, shift), _rows(y))
        return y

    def channel_gradients(self, dy, x, mean, inverse):
        sums = np.zeros_like(x, np.float32, shape=(2, x.shape[-1]))
        loop_for(self._loops, "channel_gradients", x)(
            _rows(dy, x.shape), _rows(x), *_of_channels(x, mean), np.empty_like(sums), sums
        )
        return sums[0] * inverse, sums[1]

    def normalized_gradient(self, dy, x, mean, inverse, scale, mean_dscale, mean_dshift):
        dx = np.empty_like(x, order="C")
        factors = _of_channels(x, mean, inverse * mean_dscale, mean_dshift, inverse * scale)
        loop_for(self._loops, "normalized_gradient", x)(_rows(dy, x.shape), _rows(x), *factors, _rows(dx))
        return dx


def _contiguous(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32, order="C", copy=False)


def _rows(x: np.ndarray, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """x[... c] as [n c], broadcast to this shape; ValueError if it cannot be. The loops check no bounds."""
    x = contiguous(x if shape in (None, x.shape) else np.broadcast_to(x, shape))
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _of_channels(x: np.ndarray, *factors: np.ndarray) -> list[np.ndarray]:
    """Factors of each channel of x[... c], as [c]."""
    return [_contiguous(np.broadcast_to(factor, x.shape[-1:])) for factor in factors]


def _numbers(window: Window) -> tuple[int, int, int, int]:
    """A window as the loops take it."""
    return window.size, window.stride, window.dilation, window.before


def _is_depthwise(w: tuple[int, ...], groups: int) -> bool:
    """Whether each channel is convolved with its own weights alone."""
    return groups > 1 and w[2] == 1 and w[3] == groups


def _backward(window: Window, first: int) -> tuple[slice | None, Window]:
    """The gradient at inputs first, first + stride, ... as a convolution of the outputs' gradient with stride 1.

    Returns the window's taps that read these inputs, in the order of that convolution (None: no tap does), and the
    window of that convolution.
    Input first + m * stride was read by tap k of output p if p * stride = first + m * stride + before - k * dilation.
    """
    place, common = first + window.before, gcd(window.stride, window.dilation)
    taps = [k for k in range(window.size) if (place - k * window.dilation) % window.stride == 0]
    if not taps:
        return None, window
    nearest = (place - taps[-1] * window.dilation) // window.stride  # the output that the last tap reads, for m = 0
    last_to_first = slice(taps[-1], taps[0] - 1 if taps[0] else None, -(window.stride // common))
    return last_to_first, Window(len(taps), 1, window.dilation // common, -nearest)


# --- Several groups of few channels as one: less work where a vector of outputs is computed at once
#
# The weights between channels of different groups are then 0, and their gradients are left out.


def side_by_side(groups: int, outputs: int, wide: int) -> int:
    """How many of the groups, with this number of ``outputs`` each, to take as one: the most that divide the groups and
    have at most ``wide`` outputs."""
    return max(m for m in range(1, max(1, min(groups, wide // max(1, outputs))) + 1) if groups % m == 0)


def joined(w: np.ndarray, groups: int, m: int) -> np.ndarray:
    """w[k l i (g o)] of convolutions in ``groups`` as [k l (m i) (g o)], with m of these as one."""
    k, l, i, f = w.shape
    o = f // groups
    wide = np.zeros_like(w, shape=(k, l, m, i, groups // m, m, o))
    parts = w.reshape(k, l, i, groups // m, m, o)
    for part in range(m):
        wide[:, :, part, :, :, part] = parts[:, :, :, :, part]
    return wide.reshape(k, l, m * i, f)


def parted(wide: np.ndarray, groups: int, m: int) -> np.ndarray:
    """The gradients of w[k l i (g o)] in those of [k l (m i) (g o)]: the adjoint of ``joined``."""
    k, l, mi, f = wide.shape
    i, o = mi // m, f // groups
    blocks = wide.reshape(k, l, m, i, groups // m, m, o)
    w = np.empty_like(wide, shape=(k, l, i, groups // m, m, o))
    for part in range(m):
        w[:, :, :, :, part] = blocks[:, :, part, :, :, part]
    return w.reshape(k, l, i, f)
