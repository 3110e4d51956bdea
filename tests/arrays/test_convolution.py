"""Convolutions and pooling against loops over every output, and backwards as adjoints."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_engine.arrays.images import (
    average_pool,
    average_pool_gradient,
    conv2d,
    conv2d_input_gradient,
    conv2d_weight_gradient,
    max_pool,
    max_pool_gradient,
)
from spmd_engine.arrays.windows import Window
from spmd_engine.errors import UsageError
from support.numerics import normals

windows = st.builds(
    Window,
    size=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 3),
    before=st.integers(-2, 3),
    after=st.integers(-2, 3),
)
lengths = st.integers(0, 7)


def read(x, rows, columns, p, q, padding):
    """The window [b k l c] of x[b h w c] that output p, q reads, element by element."""
    found = np.full((x.shape[0], rows.size, columns.size, x.shape[3]), padding, x.dtype)
    for k in range(rows.size):
        for l in range(columns.size):
            h = p * rows.stride - rows.before + k * rows.dilation
            w = q * columns.stride - columns.before + l * columns.dilation
            if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                found[:, k, l] = x[:, h, w]
    return found


def each_output(x, rows, columns):
    """All (p, q): those whose window fits into the padded image."""
    height, width = x.shape[1] + rows.before + rows.after, x.shape[2] + columns.before + columns.after
    for p in range(rows.outputs(x.shape[1])):
        assert p * rows.stride + rows.span <= height
        for q in range(columns.outputs(x.shape[2])):
            assert q * columns.stride + columns.span <= width
            yield p, q


def outputs(x, rows, columns, channels):
    return np.zeros((x.shape[0], rows.outputs(x.shape[1]), columns.outputs(x.shape[2]), channels))


def convolve(x, w, rows, columns, groups):
    """conv2d by definition."""
    y = outputs(x, rows, columns, w.shape[3])
    i, o = w.shape[2], w.shape[3] // groups
    for p, q in each_output(x, rows, columns):
        window = read(x, rows, columns, p, q, 0.0)
        for g in range(groups):
            taken = slice(g * o, (g + 1) * o)
            y[:, p, q, taken] = np.einsum("bkli,klio->bo", window[..., g * i : (g + 1) * i], w[..., taken])
    return y


@given(lengths, lengths, st.integers(1, 3), st.integers(-3, 0), st.integers(-2, 0), st.integers(0, 2))
def test_one_tap_without_padding(height, width, stride, before, after, batch):
    """What is multiplied as it lies, by definition, and as patches."""
    rows, columns = Window(1, stride, 1, before, after), Window(1, 1, 2, after, 0)
    x, w = normals(batch, height, width, 3), normals(1, 1, 3, 2, seed=1)
    y = conv2d(x, w, rows, columns)
    np.testing.assert_allclose(y, convolve(x, w, rows, columns, 1), rtol=0, atol=1e-13)
    dy = normals(*y.shape, seed=2)
    for function, others in (
        (conv2d_input_gradient, (dy, w, rows, columns, 1, (height, width))),
        (conv2d_weight_gradient, (x, dy, rows, columns, 1)),
    ):
        expected = function.__wrapped__(*others)
        assert function(*others).shape == expected.shape
        np.testing.assert_allclose(function(*others), expected, rtol=0, atol=1e-13)


# --- windows


@given(windows, lengths)
def test_a_further_output_does_not_fit(window, length):
    outputs, padded = window.outputs(length), length + window.before + window.after
    assert outputs * window.stride + window.span > padded
    assert not outputs or (outputs - 1) * window.stride + window.span <= padded


@given(windows, lengths, st.data())
def test_what_outputs_need_is_what_their_taps_read(window, length, data):
    total = window.outputs(length)
    first = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(first, total))
    read = {h for _, _, inputs in window.taps(length, first, stop) for h in range(length)[inputs]}
    start, end = window.needs(first, stop, length)
    assert 0 <= start <= end <= length
    assert read <= set(range(start, end))
    if read and window.dilation == 1:
        assert (min(read), max(read)) == (start, end - 1)


@pytest.mark.parametrize("length", range(1, 12))
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_same_padding(size, stride, length):
    window = Window.same(size, stride, 2, length)
    assert window.outputs(length) == -(-length // stride)
    assert 0 <= window.after - window.before <= 1


@pytest.mark.parametrize("name", ["size", "stride", "dilation"])
def test_windows_of_nothing_are_refused(name):
    with pytest.raises(UsageError, match=f"{name} must be at least 1"):
        Window(**{"size": 3, name: 0})


# --- convolution


@given(windows, windows, lengths, lengths, st.integers(0, 2), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_convolution(rows, columns, height, width, batch, groups, i, o):
    x, w = normals(batch, height, width, groups * i), normals(rows.size, columns.size, i, groups * o, seed=1)
    y = conv2d(x, w, rows, columns, groups)
    np.testing.assert_allclose(y, convolve(x, w, rows, columns, groups), rtol=0, atol=1e-12)
    dy = normals(*y.shape, seed=2)
    dx = conv2d_input_gradient(dy, w, rows, columns, groups, (height, width))
    dw = conv2d_weight_gradient(x, dy, rows, columns, groups)
    assert dx.shape == x.shape and dw.shape == w.shape
    np.testing.assert_allclose([(dx * x).sum(), (dw * w).sum()], (dy * y).sum(), rtol=1e-9, atol=1e-9)


def test_shapes_that_disagree_are_refused():
    x, w, window = normals(1, 5, 5, 4), normals(3, 3, 4, 6), Window(3)
    for arguments in ((x[..., :3], w, window, window), (x, w, Window(2), window), (x, w, window, window, 2)):
        with pytest.raises(ValueError, match="groups"):
            conv2d(*arguments)
    with pytest.raises(ValueError, match="the outputs have shape"):
        conv2d_weight_gradient(x, normals(1, 4, 3, 6), window, window, 1)


# --- pooling


@given(windows, windows, lengths, lengths, st.integers(0, 2), st.integers(0, 3))
def test_max_pool(rows, columns, height, width, batch, channels):
    x = np.round(normals(batch, height, width, channels))  # few values: many are equal
    y, chosen = max_pool(x, rows, columns)
    dy = normals(*y.shape, seed=1)
    expected, dx = np.zeros_like(y), np.zeros_like(x)
    for p, q in each_output(x, rows, columns):
        window = read(x, rows, columns, p, q, -np.inf).reshape(batch, rows.size * columns.size, channels)
        expected[:, p, q] = window.max(axis=1)
        k, l = np.divmod(window.argmax(axis=1), columns.size)
        h = p * rows.stride - rows.before + k * rows.dilation
        w = q * columns.stride - columns.before + l * columns.dilation
        for b, c in np.argwhere(expected[:, p, q] > -np.inf):
            dx[b, h[b, c], w[b, c], c] += dy[b, p, q, c]
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_allclose(max_pool_gradient(dy, chosen, rows, columns, (height, width)), dx, rtol=0, atol=1e-12)


def test_what_is_not_a_number_stays_so():
    x = np.zeros((1, 4, 4, 1))
    x[0, 1, 2] = np.nan
    y, chosen = max_pool(x, Window(2, stride=2), Window(2, stride=2))
    np.testing.assert_array_equal(np.isnan(y[0, :, :, 0]), [[False, True], [False, False]])
    assert chosen[0, 0, 1, 0] == 2


@given(windows, windows, lengths, lengths, st.integers(0, 2), st.booleans())
def test_average_pool(rows, columns, height, width, batch, count_include_pad):
    x = normals(batch, height, width, 2)
    y = average_pool(x, rows, columns, count_include_pad)
    expected = np.zeros_like(y)
    for p, q in each_output(x, rows, columns):
        counted = 1.0 if count_include_pad else read(np.ones_like(x), rows, columns, p, q, 0.0)
        total = (np.ones((batch, rows.size, columns.size, 2)) * counted).sum(axis=(1, 2))
        expected[:, p, q] = read(x, rows, columns, p, q, 0.0).sum(axis=(1, 2)) / np.maximum(total, 1)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)
    dy = normals(*y.shape, seed=1)
    dx = average_pool_gradient(dy, rows, columns, count_include_pad, (height, width))
    assert dx.shape == x.shape
    np.testing.assert_allclose((dx * x).sum(), (dy * y).sum(), rtol=1e-9, atol=1e-9)
