"""Causal attention in blocks against the plain formula, forward and backward. Inputs are read-only."""

import numpy as np
import pytest

from spmd_engine.arrays import attention
from spmd_engine.arrays.attention import causal_attention, causal_attention_backward
from support.numerics import assert_gradient, frozen, normals
from support.pairwise import in_turn


def plain_attention(q, k, v, positions, key_positions, window=1 << 30):
    """Output and probabilities, from all scores at once; 0 where nothing is seen."""
    scores = np.einsum("bshk,bthk->bhst", q, k) / np.sqrt(q.shape[3])
    distances = positions[:, None] - key_positions[None, :]
    scores[..., (distances < 0) | (distances >= window)] = -np.inf
    p = np.exp(scores - np.maximum(scores.max(axis=3, keepdims=True), -1e300))
    p /= np.maximum(p.sum(axis=3, keepdims=True), 1e-300)
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


@pytest.mark.parametrize("documents", [False, True])
def test_queries_without_keys_beside_others_have_no_gradient(documents):
    """As on a rank whose keys begin later: queries 0 to 3 see none, and are in one block with the others."""
    positions, key_positions = np.arange(10), np.arange(4, 10)
    q, k, v = queries_keys_values(10, 6, 2)
    apart = (np.zeros((2, 10), int), np.zeros((2, 6), int)) if documents else None
    seen, dy = (positions, key_positions, apart, None if documents else 20), normals(*q.shape, seed=3)
    y, log_sums = causal_attention(q, k, v, *seen)
    gradients = causal_attention_backward(dy, q, k, v, y, log_sums, *seen)
    expected, p = plain_attention(q, k, v, positions, key_positions)
    for array, right in zip((y, *gradients), (expected, *plain_attention_backward(dy, q, k, v, p))):
        np.testing.assert_allclose(array, right, atol=1e-12)
    assert np.all(gradients[0][:, :4] == 0)


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


@in_turn(
    2,
    window=[1, 20, 64, 65, 1000],
    **{"positions, key_positions": [pytest.param(*each, id=name) for name, each in POSITIONS.items()]},
)
def test_a_window_of_positions(positions, key_positions, window):
    q, k, v = queries_keys_values(len(positions), len(key_positions), heads=2)
    seen, dy = (positions, key_positions, None, window), normals(*q.shape, seed=3)
    y, log_sums = causal_attention(q, k, v, *seen)
    expected, p = plain_attention(q, k, v, positions, key_positions, window)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)
    if np.isfinite(log_sums).all():  # else another rank's keys make them so
        gradients = causal_attention_backward(dy, q, k, v, y, log_sums, *seen)
        for array, right in zip(gradients, plain_attention_backward(dy, q, k, v, p)):
            np.testing.assert_allclose(array, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block_elements", [1, 140, 700])
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


@pytest.mark.parametrize("positions, key_positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("shared", [1, 3])
def test_queries_that_share_a_key_head(positions, key_positions, shared):
    """As if every query had a copy of its key head, with the copies' gradients added up."""
    q, k, v = queries_keys_values(len(positions), len(key_positions), heads=2)
    q = normals(2, len(positions), 2, shared, 4, seed=5)
    dy = normals(*q.shape, seed=3)
    y, log_sums = causal_attention(q, k, v, positions, key_positions)
    gradients = causal_attention_backward(dy, q, k, v, frozen(y), frozen(log_sums), positions, key_positions)

    def by_head(x):
        return x.reshape(2, -1, 2 * shared, 4)

    copies = [np.repeat(x, shared, axis=2) for x in (k, v)]
    expected, p = plain_attention(by_head(q), *copies, positions, key_positions)
    dq, dk, dv = plain_attention_backward(by_head(dy), by_head(q), *copies, p)
    dk, dv = (x.reshape(2, -1, 2, shared, 4).sum(axis=3) for x in (dk, dv))
    assert log_sums.shape == (2, 2, shared, len(positions))
    for array, right in zip((y, *gradients), (expected, dq, dk, dv)):
        np.testing.assert_allclose(array, right.reshape(array.shape), rtol=0, atol=1e-12)


def test_shared_keys_in_blocks_of_any_size(monkeypatch):
    _, k, v = queries_keys_values(33, 33, heads=2)
    q, positions = normals(2, 33, 2, 3, 4, seed=5), np.arange(33)
    whole = causal_attention(q, k, v, positions, positions)
    gradients = causal_attention_backward(q, q, k, v, *whole, positions, positions)
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 400)
    parts = causal_attention(q, k, v, positions, positions)
    parts += causal_attention_backward(q, q, k, v, *parts, positions, positions)
    for array, right in zip(parts, (*whole, *gradients)):
        np.testing.assert_allclose(array, right, rtol=0, atol=1e-12)


def test_gradients_of_some_keys_are_parts_of_the_whole():
    """With output and sums over all keys, those of blocks of keys add up: what a ring relies on."""
    q, k, v = queries_keys_values(20, 40, heads=2)
    positions, key_positions = np.arange(20, 40), np.arange(40)
    y, log_sums = causal_attention(q, k, v, positions, key_positions)
    expected = causal_attention_backward(q, q, k, v, y, log_sums, positions, key_positions)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for keys in slice(0, 11), slice(11, 25), slice(25, 40):
        rows = slice(max(0, keys.start - 20), None)  # those that see a key of the block
        block = (k[:, keys], v[:, keys], y[:, rows], log_sums[..., rows], positions[rows], key_positions[keys])
        dq_part, dk[:, keys], dv[:, keys] = causal_attention_backward(q[:, rows], q[:, rows], *block)
        dq[:, rows] += dq_part
    for array, right in zip((dq, dk, dv), expected):
        np.testing.assert_allclose(array, right, rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("dtype, size", [(np.float64, 1e30), (np.float32, 1e9)])
def test_attention_with_scores_beyond_the_precision_of_their_differences(dtype, size):
    q, k, v = (normals(1, 40, 2, 4, seed=seed).astype(dtype) for seed in range(3))
    y, log_sums = causal_attention(dtype(size) * q, dtype(size) * k, v, np.arange(40), np.arange(40))
    scores = np.einsum("bshk,bthk->bhst", q, k, dtype=np.float64) + np.where(np.tri(40), 0, -np.inf)
    chosen = v[0][scores[0].argmax(axis=-1), np.arange(2)[:, None]].transpose(1, 0, 2)
    np.testing.assert_allclose(y[0], chosen, rtol=1e-6)
    assert np.isfinite(log_sums).all()


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
