"""Convolutions of one tap, without padding: plain matrix products of the pixels that they read, nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import prod

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.window import Window, check_convolution, check_gradient, outputs_of


def by_product(product: Callable) -> Callable:
    """Let ``product`` compute what is decorated, a function of (array, array, rows, columns, groups, ...), if all
    channels read all pixels by one tap each, and no padding."""

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def run(a: Array, b: Array, rows: Window, columns: Window, groups: int = 1, *others) -> Array:
            plain = groups == 1 and _is_plain(rows) and _is_plain(columns)
            return (product if plain else function)(a, b, rows, columns, groups, *others)

        return run

    return decorate


def conv2d(x: Array, w: Array, rows: Window, columns: Window, groups: int) -> Array:
    """y[b p q f] of x[b h w c] and w[1 1 c f]."""
    check_convolution(x.shape, w.shape, rows, columns, groups)
    read = _pixels(x[_read(rows, columns)])
    return (read @ w[0, 0]).reshape(outputs_of(x.shape, rows, columns, w.shape[3]))


def input_gradient(
    dy: Array, w: Array, rows: Window, columns: Window, groups: int, lengths: tuple[int, int]
) -> Array:
    """dx[b h w c] for dy[b p q f]: 0 where strides left pixels out."""
    shape = dy.shape[0], *lengths, w.shape[2]
    check_convolution(shape, w.shape, rows, columns, groups)
    check_gradient(dy.shape, shape, rows, columns, w.shape[3])
    of_read = (_pixels(dy) @ w[0, 0].T).reshape(*dy.shape[:3], w.shape[2])
    if of_read.shape == shape:
        return of_read
    dx = backend_of(dy).xp.zeros(shape, dy.dtype)
    dx[_read(rows, columns)] = of_read
    return dx


def weight_gradient(x: Array, dy: Array, rows: Window, columns: Window, groups: int) -> Array:
    """dw[1 1 c f] for dy[b p q f]."""
    check_gradient(dy.shape, x.shape, rows, columns, dy.shape[3])
    return (_pixels(x[_read(rows, columns)]).T @ _pixels(dy))[None, None]


def _is_plain(window: Window) -> bool:
    return window.size == 1 and window.before <= 0 and window.after <= 0


def _read(rows: Window, columns: Window) -> tuple[slice, ...]:
    """The pixels of x[b h w c] that outputs read, where a padding below 0 leaves some out at either end."""
    return slice(None), *(slice(-window.before, window.after or None, window.stride) for window in (rows, columns))


def _pixels(x: Array) -> Array:
    """x[b h w c] as [(b h w) c]."""
    return x.reshape(prod(x.shape[:3]), x.shape[3])
