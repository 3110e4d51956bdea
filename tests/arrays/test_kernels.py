"""Kernels, but for attention, against plain formulas and finite differences. Inputs are read-only."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_engine.arrays.activations import gelu, gelu_erf, relu, soft_cap, soft_cap_slope
from spmd_engine.arrays.fused import CACHE_ELEMENTS, chunks
from spmd_engine.arrays.normalization import layer_norm, layer_norm_backward, layer_norm_backward_parameters
from spmd_engine.arrays.scatter import add_rows, count_each
from spmd_engine.arrays.updates import adamw, momentum_sgd, sum_of_squares
from support.numerics import assert_gradient, frozen, normals

LONG = 2 * CACHE_ELEMENTS + 77  # more than two chunks, and no whole number of them
SHAPES = [(), (0,), (5,), (3, 0, 2), (2, 3, 4), (LONG,), (3, LONG), (LONG, 3)]

# --- chunks


@pytest.mark.parametrize("shape", [(0,), (1,), (LONG,), (LONG, 3), (3, LONG), (5, 0), (0, 5), (LONG, 2, 2)])
def test_chunks_cover_every_row_once(shape):
    x = np.zeros(shape, np.int8)
    for part in chunks(x):
        assert x[part].size <= max(CACHE_ELEMENTS, x[:1].size)
        x[part] += 1
    assert (x == 1).all()


def test_chunks_are_few():
    assert len(list(chunks(np.empty((LONG, 3))))) == math.ceil(LONG / (CACHE_ELEMENTS // 3))


# --- activations


def plain_gelu(z):
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


@pytest.mark.parametrize("shape", SHAPES)
def test_gelu(shape):
    z = frozen(3 * normals(*shape))
    y, slope = gelu(z)
    np.testing.assert_allclose(y, plain_gelu(z), atol=1e-14, strict=True)
    differences = (plain_gelu(z + 1e-5) - plain_gelu(z - 1e-5)) / 2e-5
    np.testing.assert_allclose(slope, differences, atol=1e-9)
    assert slope.shape == z.shape


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-15), (np.float32, 2e-7)])
def test_gelu_of_the_normal_distribution(dtype, tolerance):
    z = frozen(np.concatenate((np.linspace(-9, 9, 2001), [-40, -1e-9, 0, 1e-9, 40])).astype(dtype))
    y, slope = gelu_erf(z)
    below = np.array([math.erfc(-each / math.sqrt(2)) / 2 for each in z.tolist()])
    np.testing.assert_allclose(y, z * below, rtol=tolerance, atol=tolerance)
    bell = np.exp(-(z.astype(float) ** 2) / 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(slope, below + z * bell, rtol=0, atol=tolerance)
    assert y.dtype == slope.dtype == dtype


def test_soft_cap():
    x = 3 * normals(50)
    y = x.copy()
    soft_cap(y, 2.0)
    np.testing.assert_allclose(y, 2 * np.tanh(x / 2), rtol=1e-14)
    np.testing.assert_allclose(soft_cap_slope(y, 2.0), np.cosh(x / 2) ** -2, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
def test_relu(shape):
    z = normals(*shape)
    y, slope = relu(z)
    np.testing.assert_array_equal(y, np.maximum(z, 0))
    np.testing.assert_array_equal(slope, z > 0)


def test_relu_is_flat_at_zero():
    assert not relu(np.zeros(1))[1][0]


@pytest.mark.parametrize("activation", [gelu, relu])
def test_activation_of_a_transposed_array(activation):
    z = normals(40, 30)
    for result, expected in zip(activation(z.T), activation(z)):
        np.testing.assert_array_equal(result, expected.T)


@pytest.mark.parametrize("activation", [gelu, relu])
def test_activation_without_slope(activation):
    z = normals(7, 5)
    y, slope = activation(z, want_slope=False)
    assert slope is None
    np.testing.assert_array_equal(y, activation(z)[0])


def test_gelu_far_out():
    y, slope = gelu(np.array([-50.0, 50.0]))
    np.testing.assert_array_equal(y, [0.0, 50.0])
    np.testing.assert_array_equal(slope, [0.0, 1.0])


def test_gelu_in_float32():
    z = normals(1000, dtype=np.float32)
    y, slope = gelu(z)
    assert y.dtype == slope.dtype == np.float32
    np.testing.assert_allclose(y, plain_gelu(z.astype(np.float64)), atol=1e-6)


# --- layer norm


def plain_layer_norm(x, scale, shift, epsilon=1e-5):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon) * scale + shift


ROWS = [(4, 6), (2, 3, 6), (0, 6), (2, 0, 6), (CACHE_ELEMENTS // 2, 6), (1, 1)]


@pytest.mark.parametrize("shape", ROWS)
def test_layer_norm(shape):
    x, scale, shift = normals(*shape), normals(shape[-1], seed=1), normals(shape[-1], seed=2)
    y, normal, inverse = layer_norm(x, scale, shift, 1e-5)
    np.testing.assert_allclose(y, plain_layer_norm(x, scale, shift), atol=1e-13, strict=True)
    np.testing.assert_allclose(normal, plain_layer_norm(x, 1, 0), atol=1e-13, strict=True)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(x.var(axis=-1) + 1e-5), atol=1e-9, strict=True)


@pytest.mark.parametrize("shape", ROWS)
def test_layer_norm_backward(shape):
    x, dy = normals(*shape), normals(*shape, seed=3)
    scale, shift = normals(shape[-1], seed=1), normals(shape[-1], seed=2)
    _, normal, inverse = layer_norm(x, scale, shift, 1e-5)
    dx = layer_norm_backward(dy, frozen(normal), frozen(inverse), scale)
    dscale, dshift = layer_norm_backward_parameters(dy, normal)
    assert_gradient(lambda x: (plain_layer_norm(x, scale, shift) * dy).sum(), x, dx)
    assert_gradient(lambda scale: (plain_layer_norm(x, scale, shift) * dy).sum(), scale, dscale)
    assert_gradient(lambda shift: (plain_layer_norm(x, scale, shift) * dy).sum(), shift, dshift)


def test_layer_norm_of_a_strided_array():
    x, dy, ones = normals(6, 5, 4), normals(6, 5, 4, seed=1), np.ones(6)
    y, normal, inverse = layer_norm(x.T, ones, ones, 1e-5)
    same_y, same_normal, same_inverse = layer_norm(x.T.copy(), ones, ones, 1e-5)
    np.testing.assert_array_equal(y, same_y)
    dx = layer_norm_backward(dy.T, normal, inverse, ones)
    np.testing.assert_array_equal(dx, layer_norm_backward(dy.T.copy(), same_normal, same_inverse, ones))


def test_layer_norm_far_from_zero():
    x = normals(50, 32)
    y, _, _ = layer_norm(x + 1e6, np.ones(32), np.zeros(32), 1e-5)
    np.testing.assert_allclose(y, plain_layer_norm(x, 1, 0), atol=1e-8)


def test_layer_norm_keeps_float32():
    x = normals(3, 8, dtype=np.float32)
    results = layer_norm(x, x[0], x[1], 1e-5)
    dx = layer_norm_backward(x, *results[1:], x[0])
    assert {a.dtype for a in (*results, dx, *layer_norm_backward_parameters(x, results[1]))} == {x.dtype}


# --- adding rows to a table


@given(st.lists(st.integers(0, 6)), st.sampled_from([np.int64, np.int32, np.uint16]))
def test_add_rows(indices, dtype):
    indices = frozen(np.array(indices, dtype))
    rows = frozen(np.arange(3.0 * len(indices)).reshape(-1, 3))
    table = np.ones((7, 3))
    expected = table.copy()
    np.add.at(expected, indices, rows)
    assert add_rows(table, indices, rows) is None
    np.testing.assert_array_equal(table, expected)


def test_add_rows_many_times_to_one():
    table = np.zeros((4, 2), np.float32)
    add_rows(table, np.full(10_000, 2), np.ones((10_000, 2), np.float32))
    np.testing.assert_array_equal(table, [[0, 0], [0, 0], [10_000, 10_000], [0, 0]])


@given(st.lists(st.integers(0, 6)), st.integers(7, 9))
def test_count_each(indices, size):
    counts = count_each(frozen(np.array(indices, np.int64)), size)
    assert counts.tolist() == [indices.count(number) for number in range(size)]


# --- optimizer updates


@pytest.mark.parametrize("size", [0, 5, LONG])
@pytest.mark.parametrize("decay, scale", [(0.0, 1.0), (0.1, 1.0), (0.1, 0.25)])
def test_adamw(size, decay, scale):
    p = normals(size).copy()
    mean, square = np.zeros(size), np.zeros(size)
    expected, m, v = p.copy(), np.zeros(size), np.zeros(size)
    for step in range(1, 6):
        g, rate = normals(size, seed=step), 0.01 * step
        options = {"betas": (0.9, 0.95), "epsilon": 1e-8, "decay": decay, "scale": scale}
        adamw(p, g, mean, square, step=step, rate=rate, **options)
        m = 0.9 * m + 0.1 * (g * scale)
        v = 0.95 * v + 0.05 * (g * scale) ** 2
        m_hat, v_hat = m / (1 - 0.9**step), v / (1 - 0.95**step)
        expected = (1 - rate * decay) * expected - rate * m_hat / (np.sqrt(v_hat) + 1e-8)
        for array, right in ((p, expected), (mean, m), (square, v)):
            np.testing.assert_allclose(array, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [0, 5, LONG])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay, scale", [(0.0, 1.0), (0.1, 0.25)])
def test_momentum_sgd(size, momentum, decay, scale):
    p = normals(size).copy()
    velocity = np.zeros(size) if momentum else None
    expected, u = p.copy(), np.zeros(size)
    for step in range(1, 6):
        g, rate = normals(size, seed=step), 0.01 * step
        momentum_sgd(p, g, velocity, rate=rate, momentum=momentum, decay=decay, scale=scale)
        u = momentum * u + g * scale
        expected = (1 - rate * decay) * expected - rate * u
        np.testing.assert_allclose(p, expected, rtol=1e-12, atol=1e-14)
    if momentum:
        np.testing.assert_allclose(velocity, u, rtol=1e-12, atol=1e-14)


def test_updates_stay_in_place_and_in_float32():
    p, g = np.ones(10, np.float32), normals(10, dtype=np.float32)
    state = np.zeros((3, 10), np.float32)
    part = p[2:8]
    adamw(part, g[2:8], *state[:2, 2:8], step=1, rate=0.1, betas=(0.9, 0.95), epsilon=1e-8, decay=0.1)
    momentum_sgd(part, g[2:8], state[2, 2:8], rate=0.1, momentum=0.9, decay=0.1)
    changed = np.arange(10) // 2 % 5
    assert ((p != 1) == ((changed > 0) & (changed < 4))).all()
    assert (state[:, [0, 1, 8, 9]] == 0).all() and (state[:, 2:8] != 0).all()


@pytest.mark.parametrize("size", [0, 1, LONG])
def test_sum_of_squares(size):
    x = normals(size)
    assert sum_of_squares(x) == pytest.approx(math.fsum(x * x), rel=1e-13)


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_sum_of_squares_that_float32_cannot_hold(size):
    x = np.full(LONG, size, np.float32)
    assert sum_of_squares(x) == pytest.approx(LONG * size**2, rel=1e-6)


def test_sum_of_squares_loses_nothing_small_in_float32():
    x = np.full(64 * CACHE_ELEMENTS, 1e-3, np.float32)
    x[0] = 1e3
    assert sum_of_squares(x) - 1e6 == pytest.approx(x.size * 1e-6, rel=0.1)
