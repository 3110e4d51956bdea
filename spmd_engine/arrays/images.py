"""Convolutions and pooling of images, forward and backward. Channels come last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from math import prod

from spmd_engine.arrays.backend import CPU, Array, backend_of
from spmd_engine.arrays.factors import by_group, by_row
from spmd_engine.arrays.fused import fused_of_images
from spmd_engine.arrays.precision import accumulated_in, is_half, rounded
from spmd_engine.arrays.products import BFLOAT16, FLOAT32, convolve, matmul
from spmd_engine.arrays.windows import Window, check_convolution, check_gradient, outputs_of


def by_product(product: Callable, kind: str) -> Callable:
    """Replace the decorated function of (array, array, rows, columns, groups, ...) by ``product`` if it has windows of
    one tap without padding, and one group; or, of bfloat16, by a library's convolution, if there is one.

    ``kind`` is that of ``products.convolve``. Results are rounded to the dtype of the first array, but not a gradient
    of weights.
    """

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def run(a: Array, b: Array, rows: Window, columns: Window, groups: int = 1, *others) -> Array:
            if groups == 1 and _is_plain(rows) and _is_plain(columns):
                return product(a, b, rows, columns, groups, *others)
            if groups == 1 and a.dtype == b.dtype == BFLOAT16 and isinstance(a, CPU.xp.ndarray) and a.size and b.size:
                result = _by_library(kind, a, b, rows, columns, *others)
                if result is not None:
                    return result
            result = function(a, b, rows, columns, groups, *others)
            return rounded(result, a.dtype) if is_half(a.dtype) and kind != "w" else result

        return run

    return decorate


def _by_library(
    kind: str, a: Array, b: Array, rows: Window, columns: Window, lengths: tuple[int, int] | None = None
) -> Array | None:
    """The convolution of bfloat16 by the library for large products, which sums in float32; None without one."""
    if accumulated_in(a.dtype) != FLOAT32:
        return None
    xp = backend_of(a).xp
    if kind == "y":
        x, w, y = a, b, xp.empty(outputs_of(a.shape, rows, columns, b.shape[3]), a.dtype)
    elif kind == "x":
        x, w, y = xp.empty((len(a), *(lengths or ()), b.shape[2]), a.dtype), b, a
    else:
        x, w, y = a, xp.empty((rows.size, columns.size, a.shape[3], b.shape[3]), FLOAT32), b
    check_convolution(x.shape, w.shape, rows, columns, 1)
    check_gradient(y.shape, x.shape, rows, columns, w.shape[3])
    return {"x": x, "w": w, "y": y}[kind] if y.size and convolve(kind, x, w, y, rows, columns) else None


def pointwise_conv2d(x: Array, w: Array, rows: Window, columns: Window, groups: int) -> Array:
    """y[b p q f] of x[b h w c] and w[1 1 c f]."""
    check_convolution(x.shape, w.shape, rows, columns, groups)
    read = by_row(x[_read(rows, columns)])
    return matmul(read, w[0, 0]).reshape(outputs_of(x.shape, rows, columns, w.shape[3]))


def input_gradient(dy: Array, w: Array, rows: Window, columns: Window, groups: int, lengths: tuple[int, int]) -> Array:
    """dx[b h w c] for dy[b p q f]: 0 at pixels that strides skip."""
    shape = dy.shape[0], *lengths, w.shape[2]
    check_convolution(shape, w.shape, rows, columns, groups)
    check_gradient(dy.shape, shape, rows, columns, w.shape[3])
    read_gradient = matmul(by_row(dy), w[0, 0].T).reshape(*dy.shape[:3], w.shape[2])
    if read_gradient.shape == shape:
        return read_gradient
    dx = backend_of(dy).xp.zeros(shape, dy.dtype)
    dx[_read(rows, columns)] = read_gradient
    return dx


def weight_gradient(x: Array, dy: Array, rows: Window, columns: Window, groups: int) -> Array:
    """dw[1 1 c f] for dy[b p q f]."""
    check_gradient(dy.shape, x.shape, rows, columns, dy.shape[3])
    read = by_row(x[_read(rows, columns)])
    return matmul(read.T, by_row(dy), dtype=accumulated_in(x.dtype))[None, None]


def _is_plain(window: Window) -> bool:
    return window.size == 1 and window.before <= 0 and window.after <= 0


def _read(rows: Window, columns: Window) -> tuple[slice, ...]:
    """The pixels of x[b h w c] that outputs read; a negative padding leaves some out at the ends."""
    return slice(None), *(slice(-window.before, window.after or None, window.stride) for window in (rows, columns))


# --- Convolutions of images, forward and backward, as matrix products of patches
#
# Channels come last. A patch is what one output position reads, [k l i] for every group of channels. Patches are
# copied a panel at a time, small enough to stay in cache, and a panel is multiplied at once; so the temporary memory
# does not grow with the images. With one tap, pixels are the patches: see ``pointwise_conv2d``.


PANEL_ELEMENTS = 1 << 18  # 1 MiB of float32: fits a core's L2 cache


@by_product(pointwise_conv2d, "y")
@fused_of_images
def conv2d(x: Array, w: Array, rows: Window, columns: Window, groups: int = 1) -> Array:
    """y[b p q f] = sum over k, l, i of x[b h w c] * w[k l i f], where output p, q reads its windows of h and w.

    Channels c = (g i) and f = (g o) in that order: outputs of a group read the inputs of that group. As usual in
    deep learning, the kernel is not flipped. Raises ValueError if shapes, windows and groups disagree.
    """
    check_convolution(x.shape, w.shape, rows, columns, groups)
    y = backend_of(x).xp.zeros(outputs_of(x.shape, rows, columns, w.shape[3]), x.dtype)
    matrices = by_group(w, groups)
    for panel in _panels(x, y.shape, rows, columns, groups):
        block = panel.of(y)
        block[...] = matmul(panel.patches(x), matrices).transpose(1, 0, 2).reshape(block.shape)
    return y


@by_product(input_gradient, "x")
@fused_of_images
def conv2d_input_gradient(
    dy: Array, w: Array, rows: Window, columns: Window, groups: int, lengths: tuple[int, int]
) -> Array:
    """dx[b h w c] of ``conv2d`` for dy[b p q f]; ``lengths`` are those of h and w."""
    dx = backend_of(dy).xp.zeros((dy.shape[0], *lengths, w.shape[2] * groups), dy.dtype)
    check_convolution(dx.shape, w.shape, rows, columns, groups)
    check_gradient(dy.shape, dx.shape, rows, columns, w.shape[3])
    matrices = by_group(w, groups).transpose(0, 2, 1)
    for panel in _panels(dx, dy.shape, rows, columns, groups):
        panel.add(dx, matmul(by_group(panel.of(dy), groups), matrices))
    return dx


@by_product(weight_gradient, "w")
@fused_of_images
def conv2d_weight_gradient(x: Array, dy: Array, rows: Window, columns: Window, groups: int) -> Array:
    """dw[k l i f] of ``conv2d`` for dy[b p q f]."""
    shape = rows.size, columns.size, x.shape[3] // groups, dy.shape[3]
    check_convolution(x.shape, shape, rows, columns, groups)
    check_gradient(dy.shape, x.shape, rows, columns, dy.shape[3])
    dw = backend_of(x).xp.zeros((groups, shape[0] * shape[1] * shape[2], shape[3] // groups), x.dtype)
    for panel in _panels(x, dy.shape, rows, columns, groups):
        dw += matmul(panel.patches(x).transpose(0, 2, 1), by_group(panel.of(dy), groups))
    return dw.transpose(1, 0, 2).reshape(shape)


@dataclass(frozen=True)
class _Panel:
    """Some rows of outputs of some samples, and their patches."""

    samples: slice
    outputs: slice
    rows: Window
    columns: Window
    shape: tuple[int, ...]  # the patches': [g b p q k l i]

    def of(self, y: Array) -> Array:
        """The outputs of the panel in y[b p q f]."""
        return y[self.samples, self.outputs]

    def patches(self, x: Array) -> Array:
        """The patches of x[b h w c] that the outputs of the panel read, as [g (b p q) (k l i)]; 0 in the padding."""
        patches = backend_of(x).xp.zeros(self.shape, x.dtype)
        for inside, where in self._taps(x.shape):
            patches[inside] = self._grouped(x)[where].transpose(3, 0, 1, 2, 4)
        return patches.reshape(self.shape[0], prod(self.shape[1:4]), prod(self.shape[4:]))

    def add(self, dx: Array, patches: Array) -> None:
        """Add patches [g (b p q) (k l i)] to dx[b h w c]: the adjoint of ``patches``."""
        patches, grouped = patches.reshape(self.shape), self._grouped(dx)
        for inside, where in self._taps(dx.shape):
            grouped[where] += patches[inside].transpose(1, 2, 3, 0, 4)

    def _grouped(self, x: Array) -> Array:
        """x[b h w (g i)] as a view [b h w g i]."""
        return x.reshape(*x.shape[:3], self.shape[0], self.shape[-1])

    def _taps(self, x: tuple[int, ...]) -> Iterator[tuple[tuple, tuple]]:
        """For each tap that reads more than padding: its index in the patches, and in x[b h w g i]."""
        for k, p, h in self.rows.taps(x[1], self.outputs.start, self.outputs.stop):
            for l, q, w in self.columns.taps(x[2]):
                yield (slice(None), slice(None), p, q, k, l), (self.samples, h, w)


def _panels(x: Array, y: tuple[int, ...], rows: Window, columns: Window, groups: int) -> Iterator[_Panel]:
    """All outputs y[b p q f] of x[b h w c], a panel of bounded size at a time: several samples, or rows of one."""
    patch = rows.size, columns.size, x.shape[3] // groups
    lines = max(1, PANEL_ELEMENTS // max(1, y[2] * prod(patch) * groups))  # rows of outputs
    samples, height = max(1, lines // max(1, y[1])), max(1, min(lines, y[1]))
    for b in range(0, y[0], samples):
        some_samples = slice(b, min(b + samples, y[0]))
        for p in range(0, y[1], height):
            outputs = slice(p, min(p + height, y[1]))
            shape = groups, some_samples.stop - b, outputs.stop - p, y[2], *patch
            yield _Panel(some_samples, outputs, rows, columns, shape)


# --- Maxima and averages over windows of images, forward and backward. Channels come last


@fused_of_images
def max_pool(x: Array, rows: Window, columns: Window) -> tuple[Array, Array]:
    """y[b p q c], the maximum of each window of x[b h w c], and which tap of its window that is.

    Taps count in row-major order, and the first of equals is chosen. Padding counts as -inf. NaNs propagate.
    """
    xp = backend_of(x).xp
    shape = outputs_of(x.shape, rows, columns, x.shape[3])
    y = xp.full(shape, -xp.inf, x.dtype)
    chosen = xp.zeros(shape, xp.uint8 if rows.size * columns.size <= 256 else xp.int32)
    for tap, outputs, inputs in _taps(x.shape, rows, columns):
        best, value = y[outputs], x[inputs]
        greater = (value > best) | (value != value)
        chosen[outputs] = xp.where(greater, chosen.dtype.type(tap), chosen[outputs])
        xp.maximum(best, value, out=best)
    return y, chosen


@fused_of_images
def max_pool_gradient(dy: Array, chosen: Array, rows: Window, columns: Window, lengths: tuple[int, int]) -> Array:
    """dx[b h w c] of ``max_pool`` for dy[b p q c]; ``lengths`` are those of h and w."""
    dx = backend_of(dy).xp.zeros((dy.shape[0], *lengths, dy.shape[3]), dy.dtype)
    check_gradient(dy.shape, dx.shape, rows, columns, dy.shape[3])
    for tap, outputs, inputs in _taps(dx.shape, rows, columns):
        dx[inputs] += dy[outputs] * (chosen[outputs] == tap)
    return dx


def average_pool(x: Array, rows: Window, columns: Window, count_include_pad: bool) -> Array:
    """y[b p q c], the mean of each window of x[b h w c].

    Padding counts as 0 with ``count_include_pad``, else not at all: a mean over fewer elements; 0 if there are none.
    """
    y = window_sums(x, rows, columns)
    y *= _shares(x, x.shape[1:3], rows, columns, count_include_pad)
    return y


def average_pool_gradient(
    dy: Array, rows: Window, columns: Window, count_include_pad: bool, lengths: tuple[int, int]
) -> Array:
    """dx[b h w c] of ``average_pool`` for dy[b p q c]; ``lengths`` are those of h and w."""
    return window_sums_gradient(dy * _shares(dy, lengths, rows, columns, count_include_pad), rows, columns, lengths)


@fused_of_images
def window_sums(x: Array, rows: Window, columns: Window) -> Array:
    """y[b p q c], the sum of each window of x[b h w c]."""
    y = backend_of(x).xp.zeros(outputs_of(x.shape, rows, columns, x.shape[3]), x.dtype)
    for _, outputs, inputs in _taps(x.shape, rows, columns):
        y[outputs] += x[inputs]
    return y


@fused_of_images
def window_sums_gradient(dy: Array, rows: Window, columns: Window, lengths: tuple[int, int]) -> Array:
    """dx[b h w c] of ``window_sums`` for dy[b p q c]."""
    dx = backend_of(dy).xp.zeros((dy.shape[0], *lengths, dy.shape[3]), dy.dtype)
    check_gradient(dy.shape, dx.shape, rows, columns, dy.shape[3])
    for _, outputs, inputs in _taps(dx.shape, rows, columns):
        dx[inputs] += dy[outputs]
    return dx


def _taps(x: tuple[int, ...], rows: Window, columns: Window) -> Iterator[tuple[int, tuple, tuple]]:
    """(tap in row-major order, index of y[b p q c], index of x[b h w c]) of taps that read more than padding."""
    for k, p, h in rows.taps(x[1]):
        for l, q, w in columns.taps(x[2]):
            yield k * columns.size + l, (slice(None), p, q), (slice(None), h, w)


def _shares(like: Array, lengths: tuple[int, int], rows: Window, columns: Window, count_include_pad: bool) -> Array:
    """1 / the number of elements that count, for each output, [p q 1]."""
    xp = backend_of(like).xp
    if count_include_pad:
        return xp.full((1, 1, 1), 1 / (rows.size * columns.size), like.dtype)
    counts = (
        [1 / max(1, window.reads(k, length)) for k in range(window.outputs(length))]
        for window, length in zip((rows, columns), lengths, strict=True)
    )
    p, q = (backend_of(like).constant(CPU.xp.asarray(shares, like.dtype)) for shares in counts)
    return p[:, None, None] * q[:, None]
