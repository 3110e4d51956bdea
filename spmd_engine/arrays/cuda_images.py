"""The functions marked ``@fused_of_images`` on CUDA: convolutions as products of patches, pooling, and channels.

One kernel writes the patches of as many samples as fit the backend's work space, and cuBLAS multiplies them; the
gradient of the input gathers from the product, element by element, so that nothing is added atomically.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING

from spmd_engine.arrays.cuda import Elementwise, Reduction, pair_of_sums
from spmd_engine.arrays.factors import by_group, by_row
from spmd_engine.arrays.windows import Window, check_convolution, check_gradient, outputs_of

if TYPE_CHECKING:
    from spmd_engine.arrays.backend import Backend

# --- the kernels as text: see ``cuda``

#: Of images x[b h w c] and outputs [b p q c], h = height, w = width, p = down and q = across.
_WINDOWS = (
    "int32 height, int32 width, int32 down, int32 across, int32 row_taps, int32 column_taps, int32 row_stride, "
    "int32 column_stride, int32 row_dilation, int32 column_dilation, int32 top, int32 left"
)


def _of_output(body: str) -> str:
    """``body`` for each tap by which output i = [b p q c] reads element ``at`` of x."""
    return f"""
        const long long c = i % channels, pixel = i / channels, q = pixel % across, p = pixel / across % down;
        const long long sample = pixel / across / down;
        for (int k = 0; k < row_taps; ++k) {{
            const long long h = p * row_stride + k * row_dilation - top;
            if (h < 0 || h >= height) continue;
            for (int l = 0; l < column_taps; ++l) {{
                const long long w = q * column_stride + l * column_dilation - left;
                if (w < 0 || w >= width) continue;
                const long long at = ((sample * height + h) * width + w) * channels + c;
                {body}
            }}
        }}
    """


def _of_input(body: str) -> str:
    """``body`` for each tap k l by which output ``at`` = [b p q] reads input i = [b h w c]."""
    return f"""
        const long long c = i % channels, pixel = i / channels, w = pixel % width, h = pixel / width % height;
        const long long sample = pixel / width / height;
        T sum = 0;
        for (int k = 0; k < row_taps; ++k) {{
            const long long p = h + top - k * row_dilation;
            if (p < 0 || p % row_stride || p / row_stride >= down) continue;
            for (int l = 0; l < column_taps; ++l) {{
                const long long q = w + left - l * column_dilation;
                if (q < 0 || q % column_stride || q / column_stride >= across) continue;
                const long long at = (sample * down + p / row_stride) * across + q / column_stride;
                {body}
            }}
        }}
        dx = sum;
    """


ELEMENTWISE = {
    "patches": Elementwise(  # [(g b p q) (k l i)] of x[b h w (g i)]
        f"raw T x, int64 samples, int64 groups, int64 inside, {_WINDOWS}",
        "T patch",
        """
        const long long tap = i / inside, output = tap / column_taps / row_taps, pixel = output / across / down;
        const long long h = output / across % down * row_stride + tap / column_taps % row_taps * row_dilation - top;
        const long long w = output % across * column_stride + tap % column_taps * column_dilation - left;
        const bool reads = h >= 0 && h < height && w >= 0 && w < width;
        const long long from = ((pixel % samples * height + h) * width + w) * groups + pixel / samples;
        patch = reads ? x[from * inside + i % inside] : T(0);
        """,
    ),
    "of_patches": Elementwise(  # its adjoint
        f"raw T patch, int64 samples, int64 channels, int64 inside, {_WINDOWS}",
        "T dx",
        _of_input(
            """
            const long long row = c / inside * samples * down * across + at;
            sum += patch[((row * row_taps + k) * column_taps + l) * inside + c % inside];
            """
        ),
    ),
    "max_pool": Elementwise(
        f"raw T x, int64 channels, T least, {_WINDOWS}",
        "T y, uint8 chosen",
        "T best = least; int tap = 0;"
        + _of_output("if (x[at] > best || x[at] != x[at]) { best = x[at]; tap = k * column_taps + l; }")
        + "y = best; chosen = tap",
    ),
    "max_pool_gradient": Elementwise(
        f"raw T dy, raw uint8 chosen, int64 channels, {_WINDOWS}",
        "T dx",
        _of_input(
            """
            const long long element = at * channels + c;
            if (chosen[element] == k * column_taps + l) sum += dy[element];
            """
        ),
    ),
    "window_sums": Elementwise(
        f"raw T x, int64 channels, {_WINDOWS}", "T y", "T sum = 0;" + _of_output("sum += x[at];") + "y = sum"
    ),
    "window_sums_gradient": Elementwise(
        f"raw T dy, int64 channels, {_WINDOWS}", "T dx", _of_input("sum += dy[at * channels + c];")
    ),
    "scale_channels": Elementwise("T x, T mean, T factor, T shift", "T y", "y = (x - mean) * factor + shift"),
    "normalized_gradient": Elementwise(
        "T dy, T x, T mean, T inverse, T scale, T mean_dscale, T mean_dshift",
        "T dx",
        "dx = (dy - mean_dshift - (x - mean) * (inverse * mean_dscale)) * (inverse * scale)",
    ),
}
REDUCTIONS = {
    "channel_squares": Reduction(
        "T x, T mean", "T squares", "(x - mean) * (x - mean)", "a + b", "squares = a", "0", "T", ""
    ),
    "channel_gradients": pair_of_sums(
        "T dy, T x, T mean, T inverse",
        "T dscale, T dshift",
        "dy * (x - mean) * inverse, dy",
        "dscale = a.first, dshift = a.second",
    ),
}


class CudaImages:
    """The kernels of a backend. ``images`` and ``normalization`` document the functions."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._xp = backend, backend.xp
        kernels = {name: self._xp.ElementwiseKernel(*text, name=name) for name, text in ELEMENTWISE.items()}
        kernels |= {name: self._xp.ReductionKernel(**text._asdict(), name=name) for name, text in REDUCTIONS.items()}
        self._launch = SimpleNamespace(**kernels)

    def takes(self, dtype, name=""):
        return dtype.char in "fd"

    # Convolutions

    def conv2d(self, x, w, rows, columns, groups=1):
        check_convolution(x.shape, w.shape, rows, columns, groups)
        y = self._xp.empty(outputs_of(x.shape, rows, columns, w.shape[3]), x.dtype)
        matrices = by_group(w, groups)
        for samples in self._parts(x, y.shape, w.shape):
            patches, part = self._patches(x[samples], y[samples].shape, rows, columns, groups), y[samples]
            if groups == 1:
                self._xp.matmul(patches[0], matrices[0], out=part.reshape(-1, w.shape[3]))
            else:
                part[...] = self._xp.matmul(patches, matrices).transpose(1, 0, 2).reshape(part.shape)
        return y

    def conv2d_input_gradient(self, dy, w, rows, columns, groups, lengths):
        dx = self._xp.empty((len(dy), *lengths, w.shape[2] * groups), dy.dtype)
        check_convolution(dx.shape, w.shape, rows, columns, groups)
        check_gradient(dy.shape, dx.shape, rows, columns, w.shape[3])
        matrices = by_group(w, groups).transpose(0, 2, 1)
        for samples in self._parts(dx, dy.shape, w.shape):
            patches, part = self._product(by_group(dy[samples], groups), matrices), dx[samples]
            windows = _windows(part.shape, dy.shape, rows, columns)
            self._launch.of_patches(patches, len(part), dx.shape[3], w.shape[2], *windows, part)
        return dx

    def conv2d_weight_gradient(self, x, dy, rows, columns, groups):
        shape = rows.size, columns.size, x.shape[3] // groups, dy.shape[3]
        check_convolution(x.shape, shape, rows, columns, groups)
        check_gradient(dy.shape, x.shape, rows, columns, dy.shape[3])
        dw = None
        for samples in self._parts(x, dy.shape, shape):
            patches = self._patches(x[samples], dy[samples].shape, rows, columns, groups)
            part = self._product(patches.transpose(0, 2, 1), by_group(dy[samples], groups))
            dw = part if dw is None else dw + part
        if dw is None:
            return self._xp.zeros(shape, x.dtype)
        return dw.transpose(1, 0, 2).reshape(shape)

    def _parts(self, x, y, w) -> Iterator[slice]:
        """As many samples of x[b h w c] as have patches that fit the work space, at least one; shapes of y and w."""
        sample = prod(y[1:3]) * prod(w[:2]) * x.shape[3] * x.itemsize
        count = max(1, self._backend.workspace // max(1, sample))
        return (slice(first, first + count) for first in range(0, len(x), count))

    def _patches(self, x, y, rows, columns, groups):
        """[g (b p q) (k l i)] of x[b h w (g i)] for outputs of the shape y[b p q f]."""
        inside = x.shape[3] // groups
        shape = groups, prod(y[:3]), rows.size * columns.size * inside
        patches = self._xp.empty(shape, x.dtype)
        x, windows = self._xp.ascontiguousarray(x), _windows(x.shape, y, rows, columns)
        self._launch.patches(x, len(x), groups, inside, *windows, patches)
        return patches

    def _product(self, a, b):
        """a[g m k] @ b[g k n]; cuBLAS takes those of one group transposed without a copy."""
        return self._xp.matmul(a[0], b[0])[None] if len(a) == 1 else self._xp.matmul(a, b)

    # Pooling

    def max_pool(self, x, rows, columns):
        if rows.size * columns.size > 256:
            return NotImplemented
        shape = outputs_of(x.shape, rows, columns, x.shape[3])
        y, chosen = self._xp.empty(shape, x.dtype), self._xp.empty(shape, self._xp.uint8)
        x, windows = self._xp.ascontiguousarray(x), _windows(x.shape, shape, rows, columns)
        self._launch.max_pool(x, x.shape[3], -self._xp.inf, *windows, y, chosen)
        return y, chosen

    def max_pool_gradient(self, dy, chosen, rows, columns, lengths):
        if rows.size * columns.size > 256:
            return NotImplemented
        dy, windows, dx = self._gradient(dy, rows, columns, lengths)
        self._launch.max_pool_gradient(dy, self._xp.ascontiguousarray(chosen), dy.shape[3], *windows, dx)
        return dx

    def window_sums(self, x, rows, columns):
        y = self._xp.empty(outputs_of(x.shape, rows, columns, x.shape[3]), x.dtype)
        x, windows = self._xp.ascontiguousarray(x), _windows(x.shape, y.shape, rows, columns)
        self._launch.window_sums(x, x.shape[3], *windows, y)
        return y

    def window_sums_gradient(self, dy, rows, columns, lengths):
        dy, windows, dx = self._gradient(dy, rows, columns, lengths)
        self._launch.window_sums_gradient(dy, dy.shape[3], *windows, dx)
        return dx

    def _gradient(self, dy, rows, columns, lengths):
        """dy in C order, the numbers of ``_WINDOWS``, and an array for dx[b h w c]."""
        shape = dy.shape[0], *lengths, dy.shape[3]
        check_gradient(dy.shape, shape, rows, columns, dy.shape[3])
        windows = _windows(shape, dy.shape, rows, columns)
        return self._xp.ascontiguousarray(dy), windows, self._xp.empty(shape, dy.dtype)

    # Channels

    def channel_sums(self, x):
        return by_row(x).sum(axis=0)

    def channel_squares(self, x, mean):
        return self._launch.channel_squares(by_row(x), mean, axis=0)

    def scale_channels(self, x, mean, factor, shift):
        return self._launch.scale_channels(x, mean, factor, shift)

    def channel_gradients(self, dy, x, mean, inverse):
        dscale, dshift = self._xp.empty((2, x.shape[-1]), dy.dtype)
        self._launch.channel_gradients(by_row(dy), by_row(x), mean, inverse, dscale, dshift, axis=0)
        return dscale, dshift

    def normalized_gradient(self, dy, x, mean, inverse, scale, mean_dscale, mean_dshift):
        return self._launch.normalized_gradient(dy, x, mean, inverse, scale, mean_dscale, mean_dshift)


def _windows(x: tuple[int, ...], y: tuple[int, ...], rows: Window, columns: Window) -> tuple[int, ...]:
    """The numbers of ``_WINDOWS`` for x[b h w c] and outputs y[b p q f]."""
    names = "size", "stride", "dilation", "before"
    return *x[1:3], *y[1:3], *(getattr(window, name) for name in names for window in (rows, columns))
