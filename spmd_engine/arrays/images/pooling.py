"""Maxima and averages over windows of images, forward and backward. Channels come last."""

from __future__ import annotations

from collections.abc import Iterator

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.fused import fused_of_images
from spmd_engine.arrays.images.window import Window, check_gradient, outputs_of


@fused_of_images
def max_pool(x: Array, rows: Window, columns: Window) -> tuple[Array, Array]:
    """y[b p q c], the greatest that each window reads of x[b h w c], and which tap of its window that is.

    Taps count in row-major order, and the first of equals is chosen. Padding counts as -inf. What is not a number
    stays so.
    """
    xp = backend_of(x).xp
    shape = outputs_of(x.shape, rows, columns, x.shape[3])
    y = xp.full(shape, -xp.inf, x.dtype)
    chosen = xp.zeros(shape, xp.uint8 if rows.size * columns.size <= 256 else xp.int32)
    for tap, outputs, inputs in _taps(x.shape, rows, columns):
        best, value = y[outputs], x[inputs]
        greater = (value > best) | (value != value)
        chosen[outputs] = xp.where(greater, xp.asarray(tap, chosen.dtype), chosen[outputs])
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
    """y[b p q c], the mean of what each window reads of x[b h w c].

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
    """y[b p q c], the sum of what each window reads of x[b h w c]."""
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
    """(tap in row-major order, where in y[b p q c], where in x[b h w c]); without those that read padding alone."""
    for k, p, h in rows.taps(x[1]):
        for l, q, w in columns.taps(x[2]):
            yield k * columns.size + l, (slice(None), p, q), (slice(None), h, w)


def _shares(like: Array, lengths: tuple[int, int], rows: Window, columns: Window, count_include_pad: bool) -> Array:
    """One part in how many elements are counted, for each output, [p q 1]."""
    xp = backend_of(like).xp
    if count_include_pad:
        return xp.full((1, 1, 1), 1 / (rows.size * columns.size), like.dtype)
    p, q = (
        xp.asarray([1 / max(1, window.reads(each, length)) for each in range(window.outputs(length))], dtype=like.dtype)
        for window, length in zip((rows, columns), lengths, strict=True)
    )
    return p[:, None, None] * q[:, None]
