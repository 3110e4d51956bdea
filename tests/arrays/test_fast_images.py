"""The compiled loops of images against NumPy's text in float64."""

import inspect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_engine.arrays import images, normalization
from spmd_engine.arrays.backend import CPU
from spmd_engine.arrays.images import (
    conv2d,
    conv2d_input_gradient,
    conv2d_weight_gradient,
    max_pool,
    max_pool_gradient,
    window_sums,
    window_sums_gradient,
)
from spmd_engine.arrays.meta.backend import on_shapes
from spmd_engine.arrays.meta.meter import Meter, metered
from spmd_engine.arrays.numba.functions import FastFunctions
from spmd_engine.arrays.numba.images import FastImages, fast_images
from spmd_engine.arrays.windows import Window
from support.numerics import normals
from support.pairwise import every_pair
from test_convolution import lengths, windows

pytest.importorskip("numba")
fast_places = pytest.importorskip("spmd_engine.arrays.numba.places")


@pytest.fixture(scope="module")
def loops():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPMD_FAST", "1")
        return fast_images()


def close(found, expected):
    assert (found.shape, found.dtype) == (expected.shape, np.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * max(1.0, np.abs(expected).max(initial=0)))


def compare(loops, x, w, rows, columns, groups):
    """Convolution and both gradients."""
    y = conv2d(x, w, rows, columns, groups)
    dy = normals(*y.shape, seed=2)
    x4, w4, dy4 = (each.astype(np.float32) for each in (x, w, dy))
    close(loops.conv2d(x4, w4, rows, columns, groups), y)
    dx = conv2d_input_gradient(dy, w, rows, columns, groups, x.shape[1:3])
    close(loops.conv2d_input_gradient(dy4, w4, rows, columns, groups, x.shape[1:3]), dx)
    dw = conv2d_weight_gradient(x, dy, rows, columns, groups)
    close(loops.conv2d_weight_gradient(x4, dy4, rows, columns, groups), dw)


@settings(deadline=None, max_examples=40)
@given(windows, windows, lengths, lengths, st.integers(0, 2), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_convolution(loops, rows, columns, height, width, batch, groups, i, o):
    x, w = normals(batch, height, width, groups * i), normals(rows.size, columns.size, i, groups * o, seed=1)
    compare(loops, x, w, rows, columns, groups)


WIDE = fast_places.WIDE
SIZES = {
    "several tiles each way": (2, 9, 11, 5, 2 * WIDE + 3, 1),
    "whole tiles": (1, 6, 8, 3, WIDE, 1),
    "one channel": (3, 8, 8, 1, 1, 1),
    "groups of several tiles": (1, 5, 7, 3, WIDE + 1, 2),
    "narrow tiles": (2, 6, 5, 4, WIDE + 2, 1),
    "groups side by side": (2, 6, 7, 3, 2, 12),
    "groups of which no two are side by side": (1, 5, 6, 2, 3, 7),
    "depthwise": (2, 9, 10, 1, 1, 37),
}


@every_pair(
    window=[Window(3, 1, 1, 1, 1), Window(3, 2, 1, 1, 1), Window(2, 1, 2, 1, 0)],
    room={"whole": 1 << 17, "some rows": 900, "a row": 1},
    name=list(SIZES),
)
def test_a_panel_at_a_time(loops, monkeypatch, name, room, window):
    """The same for panels of several samples, of some rows and of one."""
    monkeypatch.setattr(fast_places, "PANEL_ELEMENTS", room)
    batch, height, width, i, o, groups = SIZES[name]
    x, w = normals(batch, height, width, groups * i), normals(3, window.size, i, groups * o, seed=1)
    compare(loops, x, w, Window(3, 1, 1, 1, 1), window, groups)


@pytest.mark.parametrize("name", SIZES)
def test_on_shapes_they_have_the_same_results(name):
    """As an analysis runs them, which has no values."""
    batch, height, width, i, o, groups = SIZES[name]
    window = Window(3, 2, 1, 1, 1)
    with on_shapes() as backend, metered(Meter()):
        x = backend.empty((batch, height, width, groups * i), np.float32)
        w = backend.empty((3, 3, i, groups * o), np.float32)
        y = conv2d(x, w, window, window, groups)
        dx = conv2d_input_gradient(y, w, window, window, groups, (height, width))
        dw = conv2d_weight_gradient(x, y, window, window, groups)
        assert y.shape == (batch, window.outputs(height), window.outputs(width), groups * o)
        assert (dx.shape, dw.shape) == (x.shape, w.shape)


@settings(deadline=None, max_examples=40)
@given(windows, windows, lengths, lengths, st.integers(0, 2), st.integers(0, 3))
def test_pooling(loops, rows, columns, height, width, batch, normalization):
    x = np.round(normals(batch, height, width, normalization)).astype(np.float32)  # few values: many are equal
    y, chosen = max_pool(x.astype(np.float64), rows, columns)
    for found, expected in zip(loops.max_pool(x, rows, columns), (y.astype(np.float32), chosen), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    dy = normals(*y.shape, seed=1)
    dy4 = dy.astype(np.float32)
    dx = max_pool_gradient(dy, chosen, rows, columns, (height, width))
    close(loops.max_pool_gradient(dy4, chosen, rows, columns, (height, width)), dx)
    close(loops.window_sums(x, rows, columns), window_sums(x.astype(np.float64), rows, columns))
    dx = window_sums_gradient(dy, rows, columns, (height, width))
    close(loops.window_sums_gradient(dy4, rows, columns, (height, width)), dx)


ROW = normals(6, seed=7)
OF_CHANNELS = {
    "channel_sums": lambda x, dy: (x,),
    "channel_squares": lambda x, dy: (x, ROW),
    "scale_channels": lambda x, dy: (x, ROW, ROW + 1, ROW + 2),
    "channel_gradients": lambda x, dy: (dy, x, ROW, ROW + 1),
    "normalized_gradient": lambda x, dy: (dy, x, ROW, ROW + 1, ROW + 2, ROW + 3, ROW + 4),
}


@pytest.mark.parametrize("shape", [(2, 5, 7, 6), (3000, 6), (0, 3, 3, 6)], ids=str)
@pytest.mark.parametrize("name", OF_CHANNELS)
def test_channels(loops, name, shape):
    arguments = OF_CHANNELS[name](normals(*shape), normals(*shape, seed=1))
    expected = getattr(normalization, name)(*arguments)
    found = getattr(loops, name)(*(each.astype(np.float32) for each in arguments))
    for pair in zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]:
        close(*pair)


def test_nothing_is_read_beyond_the_end_of_a_channel_s_numbers(loops):
    x, row = normals(4, 6, dtype=np.float32), normals(5, dtype=np.float32)
    for arguments in ((x, row, row, row), (x, x[0], x[0], row)):
        with pytest.raises(ValueError, match="broadcast"):
            loops.scale_channels(*arguments)
    with pytest.raises(ValueError, match="broadcast"):
        loops.channel_gradients(x[:3], x, x[0], x[0])


def test_sums_over_a_million_rows_keep_their_digits(loops):
    rows = np.full((1_000_000, 2), 0.1, np.float32)
    np.testing.assert_allclose(loops.channel_sums(rows), 1e6 * rows[0].astype(np.float64), rtol=1e-4)


def test_windows_of_many_taps_are_left_to_numpy(loops, monkeypatch):
    monkeypatch.setitem(CPU.__dict__, "image_kernels", loops)
    x, window = normals(1, 20, 20, 3, dtype=np.float32), Window(17)
    for found, expected in zip(max_pool(x, window, window), max_pool.__wrapped__(x, window, window), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_what_is_not_a_number_stays_so(loops):
    x, window = np.zeros((1, 4, 4, 40), np.float32), Window(2, stride=2)
    x[0, 1, 2, 7] = np.nan
    y, chosen = loops.max_pool(x, window, window)
    assert np.argwhere(np.isnan(y)).tolist() == [[0, 0, 1, 7]]
    assert chosen[0, 0, 1, 7] == 2


def test_arrays_that_are_not_contiguous(loops):
    x, w = normals(2, 7, 6, 10), normals(3, 3, 5, 8, seed=1)
    compare(loops, x[:, ::2, 1:, 3:8], w[..., ::2], Window(3, before=1), Window(3), 1)


def test_shapes_that_disagree_are_refused(loops):
    x, w, window = normals(1, 5, 5, 4, dtype=np.float32), normals(3, 3, 4, 6, dtype=np.float32), Window(3)
    with pytest.raises(ValueError, match="groups"):
        loops.conv2d(x[..., :3], w, window, window)
    with pytest.raises(ValueError, match="the outputs have shape"):
        loops.conv2d_input_gradient(x, w, window, window, 1, (5, 5))
    with pytest.raises(ValueError, match="the outputs have shape"):
        loops.conv2d_weight_gradient(x, x, window, window, 1)
    with pytest.raises(ValueError, match="the outputs have shape"):
        loops.max_pool_gradient(x, x.astype(np.uint8), window, window, (5, 5))


def of_images():
    functions = [f for module in (normalization, images) for f in vars(module).values() if hasattr(f, "__wrapped__")]
    return {f.__name__: f for f in functions if not hasattr(FastFunctions, f.__name__)}


def test_arrays_of_the_host_go_there(loops, monkeypatch):
    monkeypatch.setitem(CPU.__dict__, "image_kernels", loops)
    x, w = normals(1, 5, 6, 3, dtype=np.float32), normals(3, 3, 3, 4, dtype=np.float32)
    called = []
    monkeypatch.setattr(loops, "conv2d", lambda x, *others: called.append(x.dtype))
    for dtype in (np.float32, np.float64):
        conv2d(x.astype(dtype), w.astype(dtype), Window(3), Window(3), 1)
    assert called == [np.float32]


@pytest.mark.parametrize("function", of_images().values(), ids=lambda f: f.__name__)
def test_they_have_every_function_with_its_signature(function):
    own = inspect.signature(function).parameters.values()
    others = list(inspect.signature(getattr(FastImages, function.__name__)).parameters.values())[1:]
    assert [(p.name, p.kind, p.default) for p in others] == [(p.name, p.kind, p.default) for p in own]
