"""Functions of 16-bit floats: computed in float32, or float64 in the emulation, and rounded once."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from spmd_engine.arrays import einsum
from spmd_engine.arrays.activations import gelu, gelu_erf, relu, relu_squared, silu_gate, soft_cap
from spmd_engine.arrays.attention import attend_to_all, attend_to_keys, causal_attention, causal_attention_backward
from spmd_engine.arrays.elementwise import add_to, multiply_by, plus
from spmd_engine.arrays.normalization import (
    layer_norm,
    layer_norm_backward,
    layer_norm_backward_parameters,
    rms_norm,
    rms_norm_backward_scale,
)
from spmd_engine.arrays.precision import emulated, rounded, scaled, widened
from spmd_engine.arrays.products import PIECE, matmul
from spmd_engine.arrays.scatter import add_rows
from spmd_engine.losses import cross_entropy

HALVES = [bfloat16, np.float16]
each_half = pytest.mark.parametrize("half", HALVES, ids=["bfloat16", "float16"])
ROUNDING = {bfloat16: 2.0**-8, np.float16: 2.0**-11}
WIDTH = 48


def drawn(*shape, seed=0, half=bfloat16):
    return np.random.default_rng(seed).standard_normal(shape).astype(half)


def leaves(results):
    if isinstance(results, tuple):
        return [leaf for result in results for leaf in leaves(result)]
    return [] if results is None else [results]


ROWS = 3, 700, WIDTH  # more than a piece
FUNCTIONS = {
    "relu": (relu, [ROWS], "xb"),
    "relu_squared": (relu_squared, [ROWS], "xx"),
    "gelu": (gelu, [ROWS], "xx"),
    "gelu_erf": (gelu_erf, [ROWS], "xx"),
    "silu_gate": (silu_gate, [ROWS, ROWS], "xxx"),
    "layer_norm": (lambda x, s, t: layer_norm(x, s, t, 1e-5), [ROWS, (WIDTH,), (WIDTH,)], "xxw"),
    "rms_norm": (lambda x, s: rms_norm(x, s, 1e-5), [ROWS, (WIDTH,)], "xxw"),
    "layer_norm_backward": (layer_norm_backward, [ROWS, ROWS, ROWS[:2], (WIDTH,)], "x"),
    "layer_norm_backward_parameters": (layer_norm_backward_parameters, [ROWS, ROWS], "ww"),
    "rms_norm_backward_scale": (rms_norm_backward_scale, [ROWS, ROWS], "w"),
    "one row": (lambda x, s: rms_norm(x, s, 1e-5), [(WIDTH,), (WIDTH,)], "xxw"),
    "as many rows as columns": (
        lambda x, s, t: layer_norm(x, s, t, 1e-5), [(WIDTH, WIDTH), (WIDTH,), (WIDTH,)], "xxw",
    ),
    "no rows": (lambda x, s: rms_norm(x, s, 1e-5), [(0, WIDTH), (WIDTH,)], "xxw"),
}  # fmt: skip


@each_half
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_equals_that_of_exact_operands_rounded_once(name, half):
    function, shapes, kinds = FUNCTIONS[name]
    operands = [drawn(*shape, seed=seed, half=half) for seed, shape in enumerate(shapes)]
    expected = leaves(function(*(x.astype(np.float64) for x in operands)))
    found = leaves(function(*operands))
    with emulated():
        exact = leaves(function(*operands))
    for kind, y, e, z in zip(kinds, found, exact, expected, strict=True):
        assert y.dtype == {"x": np.dtype(half), "w": np.float32, "b": np.bool_}[kind]
        assert e.dtype == {"x": np.dtype(half), "w": np.float64, "b": np.bool_}[kind]
        assert y.shape == e.shape == z.shape
        error = ROUNDING[half] if kind == "x" else 1e-4
        np.testing.assert_allclose(y.astype(float), z, rtol=error, atol=1e-4)
        np.testing.assert_allclose(e.astype(float), z, rtol=ROUNDING[half] if kind == "x" else 1e-12, atol=1e-6)


@each_half
def test_products_are_rounded_once_and_weights_gradients_not_at_all(half):
    x, w, dy = drawn(2, 900, 40, half=half), drawn(40, 30, seed=1, half=half), drawn(2, 900, 30, seed=2, half=half)
    y = einsum("bsd,df->bsf", x, w)
    assert y.dtype == half
    exact = np.einsum("bsd,df->bsf", *(a.astype(np.float64) for a in (x, w)))
    np.testing.assert_allclose(y.astype(float), exact, rtol=ROUNDING[half], atol=1e-5)
    gradient = np.zeros((40, 30), np.float32)
    for _ in range(2):
        einsum("bsd,bsf->df", x, dy, out=gradient, accumulate=True)
    exact = 2 * np.einsum("bsd,bsf->df", *(a.astype(np.float64) for a in (x, dy)))
    np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-3)
    assert einsum("bsd->d", x).dtype == half
    total = einsum("bsd->d", x, dtype=np.dtype(np.float32))
    np.testing.assert_allclose(total, x.astype(np.float64).sum((0, 1)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(3 * PIECE + 1, 5, 7), (5, 3 * PIECE + 1, 7), (PIECE, 5, 900), (4, 5, 6)])
def test_products_in_pieces(shape):
    m, k, n = shape
    a, b = drawn(m, k), drawn(k, n, seed=1)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    scale = abs(exact).max()
    for dtype, error in ((np.dtype(np.float32), 1e-6), (np.dtype(bfloat16), 2.0**-8)):
        for out in (None, np.empty((m, n), dtype), np.empty((n, m), dtype).T):
            y = matmul(a, b, out=out, dtype=dtype)
            assert (out is None or y is out) and y.dtype == dtype
            np.testing.assert_allclose(y.astype(float), exact, rtol=0, atol=error * scale)


def test_sums_in_place_equal_those_of_ml_dtypes():
    x, y, row = drawn(50, WIDTH), drawn(50, WIDTH, seed=1), drawn(WIDTH, seed=2)
    x[0, :3] = np.inf, np.nan, -np.inf
    for function, ufunc in ((add_to, np.add), (multiply_by, np.multiply)):
        for other in (y, row, y.astype(np.float32), y[:, ::-1]):
            expected = x.copy()
            ufunc(expected, other, out=expected, casting="unsafe")
            changed = x.copy()
            assert function(changed, other) is changed
            np.testing.assert_array_equal(changed.astype(float), expected.astype(float))
    np.testing.assert_array_equal(plus(x, y).astype(float), (x + y).astype(float))
    transposed = drawn(WIDTH, 50).T
    add_to(transposed, y)  # not contiguous
    np.testing.assert_array_equal(transposed, drawn(WIDTH, 50).T + y)


@each_half
def test_attention_is_that_of_exact_operands(half):
    q, k, v, dy = (drawn(2, 90, 3, 8, seed=seed, half=half) for seed in range(4))
    positions = np.arange(90)
    exact = [x.astype(np.float64) for x in (q, k, v, dy)]
    y, log_sums = causal_attention(q, k, v, positions, positions)
    z, exact_sums = causal_attention(*exact[:3], positions, positions)
    assert y.dtype == half and log_sums.dtype == np.float32
    if half == bfloat16:  # whose probabilities are rounded, too
        np.testing.assert_allclose(y.astype(float), z, rtol=ROUNDING[half], atol=ROUNDING[half] * abs(z).max())
    else:
        np.testing.assert_allclose(y.astype(float), z, rtol=ROUNDING[half], atol=1e-4)
    np.testing.assert_allclose(log_sums, exact_sums, atol=1e-5)
    assert causal_attention(q, k, v, positions, positions, dtype=np.dtype(np.float32))[0].dtype == np.float32
    gradients = causal_attention_backward(dy, q, k, v, y, log_sums, positions, positions)
    expected = causal_attention_backward(exact[3], *exact[:3], z, exact_sums, positions, positions)
    for found, wanted in zip(gradients, expected, strict=True):
        assert found.dtype == half
        np.testing.assert_allclose(found.astype(float), wanted, atol=3 * ROUNDING[half] * abs(wanted).max())


@each_half
@pytest.mark.parametrize("cap", [None, 3.0])
def test_attention_to_cached_keys_rounds_as_that_of_the_whole_text(half, cap):
    q, k, v = (drawn(2, 30, 3, 8, seed=seed, half=half) for seed in range(3))
    positions = np.arange(30)
    of_each = np.broadcast_to(positions, (2, 30))
    with emulated():
        y, log_sums = causal_attention(q, k, v, positions, positions, cap=cap)
        found, sums = attend_to_keys(q, k, v, of_each, of_each, cap=cap)
        last = attend_to_all(q[:, -1:], k[:, -1:], v[:, -1:], k, v, slice(0, 30), cap)
    assert found.dtype == last.dtype == half
    np.testing.assert_array_equal(found, y)
    np.testing.assert_array_equal(last, y[:, -1:])
    np.testing.assert_allclose(sums.transpose(0, 2, 1), log_sums, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_attention_to_parts_of_the_keys_rounds_as_attention_to_all(cap):
    """As on ranks of a ring: a part of the scores has another maximum, but rounded probabilities are alike."""
    wide, positions = np.dtype(np.float64), np.arange(90)
    q, k, v, dy = (drawn(2, 90, 3, 8, seed=seed) * (3 if seed < 2 else 1) for seed in range(4))
    q, k, v, dy = (x.astype(bfloat16) for x in (q, k, v, dy))
    with emulated():
        y, log_sums = causal_attention(q, k, v, positions, positions, cap=cap, dtype=wide)
        parts = [slice(0, 40), slice(40, 90)]
        found = [
            causal_attention(q, k[:, part], v[:, part], positions, positions[part], window=90, cap=cap, dtype=wide)
            for part in parts
        ]
        weights = [np.exp(sums - log_sums).transpose(0, 2, 1)[..., None] for _, sums in found]
        np.testing.assert_allclose(sum(w * part for w, (part, _) in zip(weights, found, strict=True)), y, atol=1e-12)
        options = dict(cap=cap, dtype=wide)
        whole = causal_attention_backward(dy, q, k, v, y, log_sums, positions, positions, **options)
        of_parts = [
            causal_attention_backward(
                dy, q, k[:, part], v[:, part], y, log_sums, positions, positions[part], window=90, **options
            )
            for part in parts
        ]
    np.testing.assert_allclose(sum(dq for dq, _, _ in of_parts), whole[0], atol=1e-12)
    for number in (1, 2):
        np.testing.assert_allclose(
            np.concatenate([each[number] for each in of_parts], axis=1), whole[number], atol=1e-12
        )


def test_a_bias_of_the_last_two_dims_is_added_in_one_pass():
    x, y = drawn(2, 50, 3, 16), drawn(3, 16, seed=1)
    np.testing.assert_array_equal(add_to(x.copy(), y), x + y)


@each_half
def test_the_loss_is_computed_wide_and_its_gradient_rounded(half):
    logits, targets = drawn(4, 300, 40, half=half), np.random.default_rng(1).integers(0, 40, (4, 300))
    mask = np.arange(1200).reshape(4, 300) % 3 > 0
    value, gradient = cross_entropy(logits.astype(np.float64), targets, mask=mask, count=1)
    found, half_gradient = cross_entropy(logits.copy(), targets, mask=mask, count=1)
    assert found == pytest.approx(value, rel=1e-6)
    assert half_gradient.dtype == half
    np.testing.assert_allclose(half_gradient.astype(float), gradient, rtol=ROUNDING[half], atol=1e-6)


def test_rows_are_added_wide():
    table = np.zeros((3, 4), np.float32)
    add_rows(table, np.ones(1000, int), np.full((1000, 4), 1.0, bfloat16))
    assert (table[1] == 1000).all()  # a bfloat16 sum ends at 256


def test_numbers_of_python_and_caps():
    x = drawn(5, 6)
    assert scaled(x, 3.3).dtype == bfloat16
    np.testing.assert_array_equal(scaled(x, 3.3), rounded(widened(x) * 3.3, bfloat16))
    wide = widened(x)
    soft_cap(wide, 2.0)
    soft_cap(x, 2.0)
    np.testing.assert_array_equal(x, rounded(wide, bfloat16))
