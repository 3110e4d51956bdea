"""The kernels of the array floor against plain formulas and finite differences. Inputs are read-only."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numerics import assert_gradient, frozen, normals
from spmd_engine.arrays import attention
from spmd_engine.arrays.activations import gelu, relu
from spmd_engine.arrays.attention import causal_attention, causal_attention_backward
from spmd_engine.arrays.chunks import CACHE_ELEMENTS, chunks
from spmd_engine.arrays.normalization import layer_norm, layer_norm_backward, layer_norm_backward_parameters
from spmd_engine.arrays.scatter import add_rows
from spmd_engine.arrays.updates import adamw, momentum_sgd, sum_of_squares

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


# --- attention


def plain_attention(q, k, v, positions, key_positions):
    """Output and probabilities, from all scores at once."""
    scores = np.einsum("bshk,bthk->bhst", q, k) / np.sqrt(q.shape[3])
    scores[..., key_positions[None, :] > positions[:, None]] = -np.inf
    p = np.exp(scores - scores.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    return np.einsum("bhst,bthk->bshk", p, v), p


def plain_attention_backward(dy, q, k, v, p):
    dp = np.einsum("bshk,bthk->bhst", dy, v)
    ds = p * (dp - (dp * p).sum(axis=3, keepdims=True)) / np.sqrt(q.shape[3])
    dq, dk = np.einsum("bhst,bthk->bshk", ds, k), np.einsum("bhst,bshk->bthk", ds, q)
    return dq, dk, np.einsum("bhst,bshk->bthk", p, dy)


def queries_keys_values(queries, keys, heads, batch=2, width=4, dtype=np.float64):
    shapes = [(batch, n, heads, width) for n in (queries, keys, keys)]
    return [normals(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def check_attention(q, k, v, positions, key_positions, tolerance=1e-12):
    dy = normals(*q.shape, seed=3, dtype=q.dtype)
    y, log_sums = causal_attention(q, k, v, positions, key_positions)
    gradients = causal_attention_backward(dy, q, k, v, frozen(y), frozen(log_sums), positions, key_positions)
    expected, p = plain_attention(q, k, v, positions, key_positions)
    rights = [expected, *plain_attention_backward(dy, q, k, v, p)]
    for array, right in zip((y, *gradients), rights):
        assert array.shape == right.shape
        np.testing.assert_allclose(array, right, atol=tolerance)


@pytest.mark.parametrize("length", [1, 5, 127, 128, 129, 300])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention_of_a_whole_sequence(length, heads):
    positions = frozen(np.arange(length))
    check_attention(*queries_keys_values(length, length, heads), positions, positions)


POSITIONS = {
    "the second half": (np.arange(150, 300), np.arange(300)),
    "the last alone": (np.array([299]), np.arange(300)),
    "the first and last quarters": (np.r_[0:75, 225:300], np.arange(300)),
    "every third": (np.arange(0, 300, 3), np.arange(300)),
    "after all keys": (np.arange(500, 530), np.arange(300)),
    "before most keys": (np.arange(3), np.arange(300)),
    "fewer keys than positions": (np.arange(40, 200), np.arange(0, 200, 7)),
}


@pytest.mark.parametrize("positions, key_positions", POSITIONS.values(), ids=POSITIONS)
def test_attention_of_queries_elsewhere_than_keys(positions, key_positions):
    operands = queries_keys_values(len(positions), len(key_positions), heads=2)
    check_attention(*operands, frozen(positions.copy()), frozen(key_positions.copy()))


@pytest.mark.parametrize("block_elements", [1, 50, 700])
def test_attention_in_blocks_of_any_size(monkeypatch, block_elements):
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", block_elements)
    check_attention(*queries_keys_values(33, 33, heads=2), np.arange(33), np.arange(33))


@pytest.mark.parametrize("batch, queries, heads", [(0, 5, 2), (2, 5, 0), (2, 0, 2)])
def test_attention_of_nothing(batch, queries, heads):
    q, k, v = queries_keys_values(queries, 5, heads, batch)
    positions = np.arange(queries)
    y, log_sums = causal_attention(q, k, v, positions, np.arange(5))
    assert y.shape == q.shape and log_sums.shape == (batch, heads, queries)
    dq, dk, dv = causal_attention_backward(y, q, k, v, y, log_sums, positions, np.arange(5))
    assert dq.shape == q.shape
    for gradient in (dk, dv):
        np.testing.assert_array_equal(gradient, np.zeros(k.shape))


def test_attention_is_causal():
    q, k, v = queries_keys_values(200, 200, heads=2)
    late = np.arange(200) >= 130
    other = [np.where(late[None, :, None, None], 9.0, x) for x in (q, k, v)]
    y, _ = causal_attention(q, k, v, np.arange(200), np.arange(200))
    changed, _ = causal_attention(*other, np.arange(200), np.arange(200))
    np.testing.assert_allclose(changed[:, :130], y[:, :130], atol=1e-14)


def test_attention_with_large_scores():
    q, k, v = queries_keys_values(9, 9, heads=2)
    q = 1e4 * q
    check_attention(q, k, v, np.arange(9), np.arange(9), tolerance=1e-8)


def test_attention_of_strided_operands():
    packed = normals(2, 7, 3, 2, 4)
    check_attention(*np.moveaxis(packed, 2, 0), np.arange(7), np.arange(7))


def test_attention_keeps_float32():
    q, k, v = queries_keys_values(140, 140, heads=2, dtype=np.float32)
    positions = np.arange(140)
    check_attention(q, k, v, positions, positions, tolerance=1e-5)
    results = causal_attention(q, k, v, positions, positions)
    gradients = causal_attention_backward(q, q, k, v, *results, positions, positions)
    assert {x.dtype for x in (*results, *gradients)} == {q.dtype}


def test_plain_attention_backward_is_right():
    """The measure of all tests above, measured itself."""
    operands, positions = queries_keys_values(5, 5, heads=2), np.arange(5)
    dy = normals(2, 5, 2, 4, seed=3)
    gradients = plain_attention_backward(dy, *operands, plain_attention(*operands, positions, positions)[1])
    for i, gradient in enumerate(gradients):

        def f(x, i=i):
            y, _ = plain_attention(*operands[:i], x, *operands[i + 1 :], positions, positions)
            return (y * dy).sum()

        assert_gradient(f, operands[i], gradient)


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


def test_sum_of_squares_loses_nothing_small_in_float32():
    x = np.full(64 * CACHE_ELEMENTS, 1e-3, np.float32)
    x[0] = 1e3
    assert sum_of_squares(x) - 1e6 == pytest.approx(x.size * 1e-6, rel=0.1)
