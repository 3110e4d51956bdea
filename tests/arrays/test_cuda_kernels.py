"""The CUDA kernels against the NumPy text of the same names: on the host always, on a GPU where there is one."""

import numpy as np
import pytest

from spmd_engine.arrays import get_backend
from spmd_engine.arrays.activations import gelu, relu, silu_gate
from spmd_engine.arrays.attention import causal_attention, causal_attention_backward
from spmd_engine.arrays.backend import backend_of, unregister_backend
from spmd_engine.arrays.cuda import CudaFunctions
from spmd_engine.arrays.normalization import (
    layer_norm,
    layer_norm_backward,
    layer_norm_backward_parameters,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_scale,
)
from spmd_engine.arrays.precision import HALVES, dtype_of
from spmd_engine.arrays.products import matmul
from spmd_engine.arrays.random import bernoulli, normal, uniform
from spmd_engine.arrays.rotary import rotate
from spmd_engine.arrays.scatter import add_rows, count_each
from spmd_engine.arrays.updates import adamw, momentum_sgd, sum_of_squares, total_of_squares
from spmd_engine.losses import cross_entropy
from support.fake_cupy import events
from support.numerics import normals
from support.pairwise import in_turn


class WIDE(np.ndarray):
    """float32 among 16-bit floats."""

    def __new__(cls, x):
        return x.astype(np.float32).view(cls)


TOLERANCE = {"float32": 2e-6, "float64": 1e-12}  # of the largest number, or of 1
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture
def gpu():
    backend = get_backend("cuda")
    yield backend
    unregister_backend(backend)


def a_gpu_is_here():
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # no CuPy, or no driver
        return False


@pytest.fixture(params=["cuda", pytest.param("gpu", marks=pytest.mark.gpu)] if a_gpu_is_here() else ["cuda"])
def device(request):
    return request.getfixturevalue(request.param)


@pytest.mark.gpu
@pytest.mark.skipif(not a_gpu_is_here(), reason="no CuPy with a GPU: the kernels' text is run on the host alone")
def test_cuda_brings_these_kernels(gpu):
    assert isinstance(backend_of(gpu.xp.ones(3)).kernels, CudaFunctions)
    compare(gpu, gelu, normals(1001, dtype=np.float32))


def compare(device, function, *args, tolerance=None, **options):
    """Both compute the same, to rounding, and leave the same in their arguments. Returns what the device returned."""
    dtype = next(str(x.dtype) for x in args if isinstance(x, np.ndarray))
    here = [x.copy() if isinstance(x, np.ndarray) else x for x in args]
    there = [device.asarray(x) if isinstance(x, np.ndarray) else x for x in args]
    expected, results = function(*here, **options), function(*there, **options)
    pairs = list(zip(*(x if isinstance(x, tuple) else (x,) for x in (results, expected)))) + list(zip(there, here))
    for result, right in pairs:
        if isinstance(right, np.ndarray):
            assert backend_of(result) is device
            assert (result.shape, result.dtype) == (right.shape, right.dtype)
            close(device.to_host(result), right, tolerance or TOLERANCE[dtype])
        elif isinstance(right, float):
            close(float(result), right, tolerance or TOLERANCE[dtype])
        else:
            assert type(result) is type(right)
    return results


def close(result, right, tolerance):
    finite = np.abs(np.where(np.isfinite(right), right, 0))
    np.testing.assert_allclose(result, right, rtol=0, atol=tolerance * max(1.0, finite.max(initial=0.0)))


# --- activations

SHAPES = [(0,), (5,), (3, 0, 2), (2, 3, 4), (3, 1001)]
activation = pytest.mark.parametrize("function", [gelu, relu])


@both_dtypes
@activation
@pytest.mark.parametrize("want_slope", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations(shape, want_slope, function, dtype, device):
    compare(device, function, 3 * normals(*shape, dtype=dtype), want_slope)


@activation
def test_activations_of_views(function, device):
    z = device.asarray(normals(6, 5, 8))
    for view in (np.s_[::2], np.s_[:, 1:4, ::3], np.s_[::-1, :, 5]):
        for result, right in zip(function(z[view].T), function(device.to_host(z)[view].T)):
            close(device.to_host(result), right, 1e-12)


@both_dtypes
@activation
def test_activations_far_out(function, dtype, device):
    far = np.array([-1e4, -100, -20, -0.0, 0.0, 1e-30, 20, 100, 1e4, np.nan], dtype)
    y, slope = compare(device, function, far)
    np.testing.assert_array_equal(device.to_host(y)[[0, -2]], np.array([0, 1e4], dtype))
    np.testing.assert_array_equal(device.to_host(slope)[[0, -2]], [0, 1])


def flat_silu_gate(z, u, want_slopes):
    h, slopes = silu_gate(z, u, want_slopes)
    return h, *(slopes or ())


@both_dtypes
@pytest.mark.parametrize("want_slopes", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_gates(shape, want_slopes, dtype, device):
    compare(device, flat_silu_gate, 3 * normals(*shape, dtype=dtype), normals(*shape, seed=1, dtype=dtype), want_slopes)


@both_dtypes
def test_gates_far_out(dtype, device):
    far = np.array([-1e4, -100, -20, -0.0, 0.0, 1e-30, 20, 100, 1e4, np.nan], dtype)
    h, *_ = compare(device, flat_silu_gate, far, np.ones(10, dtype), True)
    np.testing.assert_array_equal(device.to_host(h)[[0, -2]], np.array([0, 1e4], dtype))


# --- rotary positions


@both_dtypes
@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize(
    "shape, of_batch, pairs", [((2, 5, 3, 8), False, 4), ((2, 5, 3, 2, 8), True, 4), ((1, 0, 3, 8), False, 4)]
)
def test_rotary_positions(shape, of_batch, pairs, neighbours, back, dtype, device):
    angles = normals(*(shape[:2] if of_batch else shape[1:2]), pairs, seed=1, dtype=dtype)

    def turned(x, cosines, sines):
        return rotate(x, (cosines, sines), neighbours, back=back)

    compare(device, turned, normals(*shape, dtype=dtype), np.cos(angles), np.sin(angles))
    part = angles[..., :3]  # six numbers of eight are turned
    compare(device, turned, normals(*shape, dtype=dtype), np.cos(part), np.sin(part))


# --- norms


@both_dtypes
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 33), (0, 6), (2, 0, 6), (5, 1), (1, 257), (70, 12)])
def test_layer_norm(shape, dtype, device):
    x, dy = 2 + 3 * normals(*shape, dtype=dtype), normals(*shape, seed=1, dtype=dtype)
    scale, shift = normals(shape[-1], seed=2, dtype=dtype), normals(shape[-1], seed=3, dtype=dtype)
    _, normal, inverse = layer_norm(x, scale, shift, 1e-5)
    tolerance = 1e-5 if dtype == "float32" and shape[-1] == 1 else None  # 1/sigma is 316
    compare(device, layer_norm, x, scale, shift, 1e-5, tolerance=tolerance)
    compare(device, layer_norm_backward, dy, normal, inverse, scale, tolerance=tolerance)
    compare(device, layer_norm_backward_parameters, dy, normal)


def test_layer_norm_of_a_strided_array(device):
    x, dy, scale = device.asarray(normals(6, 5, 4)), device.asarray(normals(6, 5, 4, seed=1)), normals(6, seed=2)
    on_device = device.asarray(scale)
    results = layer_norm(x.T, on_device, on_device, 1e-5)
    expected = layer_norm(device.to_host(x).T, scale, scale, 1e-5)
    dx = layer_norm_backward(dy.T, *results[1:], on_device)
    for result, right in zip(
        [*results, dx], [*expected, layer_norm_backward(device.to_host(dy).T, *expected[1:], scale)]
    ):
        close(device.to_host(result), right, 1e-12)


@both_dtypes
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 33), (0, 6), (2, 0, 6), (5, 1), (1, 257), (70, 12)])
def test_rms_norm(shape, dtype, device):
    x, dy = 2 + 3 * normals(*shape, dtype=dtype), normals(*shape, seed=1, dtype=dtype)
    scale = normals(shape[-1], seed=2, dtype=dtype)
    _, normal, inverse = rms_norm(x, scale, 1e-5)
    compare(device, rms_norm, x, scale, 1e-5)
    compare(device, rms_norm_backward, dy, normal, inverse, scale)
    compare(device, rms_norm_backward_scale, dy, normal)


def test_layer_norm_far_from_zero(device):
    """A variance as the mean of squares less the square of the mean would be lost here."""
    compare(device, layer_norm, 1e6 + normals(20, 32), np.ones(32), np.zeros(32), 1e-5, tolerance=1e-9)


# --- optimizer updates


@both_dtypes
@pytest.mark.parametrize("size", [0, 1, 1001])
@pytest.mark.parametrize("decay, scale", [(0.0, 1.0), (0.1, 0.25)])
def test_adamw(size, decay, scale, dtype, device):
    p, mean, square = normals(size, dtype=dtype), np.zeros(size, dtype), np.zeros(size, dtype)
    for step in (1, 2, 10):
        g = normals(size, seed=step, dtype=dtype)
        options = {"step": step, "rate": 0.01, "betas": (0.9, 0.95), "epsilon": 1e-8, "decay": decay, "scale": scale}
        compare(device, adamw, p, g, mean, square, **options)
        p, mean, square = p.copy(), mean.copy(), square.copy()
        adamw(p, g, mean, square, **options)  # the next step starts from here


@both_dtypes
@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("decay, scale", [(0.0, 1.0), (0.1, 0.25)])
def test_momentum_sgd(decay, scale, momentum, dtype, device):
    p, g, velocity = (normals(1001, seed=seed, dtype=dtype) for seed in range(3))
    options = {"rate": 0.1, "momentum": momentum or 0.0, "decay": decay, "scale": scale}
    compare(device, momentum_sgd, p, g, velocity if momentum else None, **options)


def test_updates_stay_in_place(device):
    arrays = [device.asarray(x) for x in np.abs(normals(4, 10))]
    before = [device.to_host(x) for x in arrays]
    p, g, mean, square = (x[2:8] for x in arrays)
    adamw(p, g, mean, square, step=1, rate=0.1, betas=(0.9, 0.95), epsilon=1e-8, decay=0.1)
    momentum_sgd(p, g, None, rate=0.1, momentum=0.0, decay=0.1)
    inside = np.arange(10) // 2 % 4 != 0
    for k, (x, old) in enumerate(zip(arrays, before)):
        np.testing.assert_array_equal(device.to_host(x) != old, inside & (k != 1))


@both_dtypes
def test_sum_of_squares(dtype, device):
    for x in (normals(0, dtype=dtype), normals(1001, dtype=dtype), 1e-30 * normals(9, dtype=dtype)):
        assert sum_of_squares(device.asarray(x)) == pytest.approx(float((x.astype(np.float64) ** 2).sum()), rel=1e-5)


@both_dtypes
def test_total_of_squares(dtype, device):
    """Of several arrays, with values whose squares a float cannot hold; the host waits once."""
    arrays = [1e30 * normals(7, dtype=dtype), 1e-30 * normals(9, dtype=dtype), normals(1001, dtype=dtype)]
    for some in (arrays[1:2], arrays[1:], arrays):
        expected = sum(float((x.astype(np.float64) ** 2).sum()) for x in some)
        assert total_of_squares([device.asarray(x) for x in some]) == pytest.approx(expected, rel=1e-12)
    assert total_of_squares([]) == 0


# --- tables of rows, and random numbers


@both_dtypes
@pytest.mark.parametrize("indices", [[], [4], [0, 0, 0], [3, 1, 3, 0, 3, 1]])
def test_rows_added_to_a_table(indices, dtype, device):
    indices = np.array(indices, np.int64)
    compare(device, add_rows, normals(5, 7, dtype=dtype), indices, normals(len(indices), 7, seed=1, dtype=dtype))
    compare(device, add_rows, normals(5, 7, dtype=dtype), indices, normals(7, len(indices), seed=1, dtype=dtype).T)


def test_rows_without_a_place_are_left_out(device):
    table, rows = device.asarray(normals(3, 2)), device.asarray(normals(4, 2, seed=1))
    expected = device.to_host(table).copy()
    expected[1] += device.to_host(rows)[1] + device.to_host(rows)[3]
    add_rows(table, device.asarray(np.array([-1, 1, -1, 1])), rows)
    close(device.to_host(table), expected, 1e-12)


@pytest.mark.parametrize("indices", [[], [4], [3, 1, 3, 0, 3, 1]])
def test_numbers_of_equal_indices(indices, device):
    indices = np.array(indices, np.int64)
    counts = device.to_host(count_each(device.asarray(indices), 6))
    np.testing.assert_array_equal(counts, np.bincount(indices, minlength=6))
    assert counts.dtype == np.int64


@both_dtypes
@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize(
    "shape, block",
    [((), None), ((0, 3), None), ((40, 50), None), ((7, 6, 5), np.s_[1:4, 2:6, 1:3]), ((1 << 40, 9), np.s_[-2:, :])],
)
def test_random_numbers(shape, block, draw, dtype, device):
    expected, drawn = draw(123456789, shape, dtype, block), draw(123456789, shape, dtype, block, device)
    assert backend_of(drawn) is device
    close(device.to_host(drawn), expected, TOLERANCE[dtype])


def test_random_bits(device):
    rows = (1 << 33) + np.arange(20).reshape(4, 5)
    drawn = bernoulli(77, 0.3, device.asarray(rows), 9, device)
    np.testing.assert_array_equal(device.to_host(drawn), bernoulli(77, 0.3, rows, 9))


# --- attention


@both_dtypes
@pytest.mark.parametrize("shared", [(), (2,)])
@pytest.mark.parametrize("length, earlier", [(1, 0), (7, 0), (70, 0), (70, 5), (5, 130)])
def test_attention(length, earlier, shared, dtype, device):
    """``earlier`` keys are seen by all; a length of 70 is two blocks, and some keys of the second are."""
    q, dy = (normals(2, length, 3, *shared, 4, seed=seed, dtype=dtype) for seed in (0, 1))
    k, v = (normals(2, earlier + length, 3, 4, seed=seed, dtype=dtype) for seed in (2, 3))
    positions, key_positions = np.arange(earlier, earlier + length), np.arange(earlier + length)
    y, log_sums = causal_attention(q, k, v, positions, key_positions)
    compare(device, causal_attention, q, k, v, positions, key_positions)
    compare(device, causal_attention_backward, dy, q, k, v, y, log_sums, positions, key_positions)


@in_turn(
    2,
    workspace={"a row": 1, "two rows": 9 * 6 * 8 * 2, "all": 1 << 30},
    shared=[pytest.param((), id="own keys"), pytest.param((2,), id="shared keys")],
    options=[{}, {"window": 3}, {"cap": 5.0}, {"apart": True}, {"apart": True, "window": 2}],
)
def test_attention_in_parts(options, shared, workspace, device, monkeypatch):
    """Rows, or samples, at a time, of positions with gaps: as one block on the host."""
    monkeypatch.setattr(device, "workspace", workspace, raising=False)
    q, dy = (normals(3, 6, 3, *shared, 4, seed=seed) for seed in (0, 1))
    k, v = (normals(3, 9, 3, 4, seed=seed) for seed in (2, 3))
    positions, keys = np.array([2, 3, 5, 6, 7, 8]), np.arange(9)
    documents = np.array([[0] * 9, [0, 0, 1, 1, 2, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 1, 1, 2]])
    apart = (documents[:, positions], documents) if options.get("apart") else None

    def forward(q, k, v, *apart):
        return causal_attention(q, k, v, *there(q, positions, keys), **options | {"apart": apart or None})

    def backward(dy, q, k, v, y, log_sums, *apart):
        arrays = dy, q, k, v, y, log_sums
        return causal_attention_backward(*arrays, *there(q, positions, keys), **options | {"apart": apart or None})

    y, log_sums = forward(q, k, v, *(apart or ()))
    compare(device, forward, q, k, v, *(apart or ()))
    compare(device, backward, dy, q, k, v, y, log_sums, *(apart or ()))


def there(like, *arrays):
    return [backend_of(like).asarray(x) for x in arrays]


def test_attention_with_large_scores(device):
    q, k, v = (normals(1, 9, 2, 4, seed=seed) for seed in range(3))
    compare(device, causal_attention, 1e3 * q, 1e3 * k, v, np.arange(9), np.arange(9), tolerance=1e-9)


# --- softmax cross-entropy


@both_dtypes
@pytest.mark.parametrize("tokens, width", [(0, 5), (1, 1), (6, 33), (40, 1000)])
def test_cross_entropy(tokens, width, dtype, device):
    logits = 3 * normals(tokens, width, dtype=dtype)
    targets = np.random.default_rng(0).integers(0, width, tokens)
    compare(device, cross_entropy, logits, targets)
    compare(device, cross_entropy, logits.reshape(1, tokens, width), targets[None].astype(np.uint16))


def test_cross_entropy_of_masked_tokens_and_large_logits(device):
    logits = np.array([[1e4, 0, -1e4], [-1e4, -1e4, -1e4], [3, 2, 1], [1e4, 1e4 - 1, 0]])
    compare(device, cross_entropy, logits, np.array([1, 2, 0, 1]))
    mask = np.array([1, 0, 1, 0])

    def masked(logits, targets, mask):
        return cross_entropy(logits, targets, mask=mask, count=7.0)

    _, gradient = compare(device, masked, logits, np.array([1, 2, 0, 1]), mask)
    assert not device.to_host(gradient)[mask == 0].any()


def test_cross_entropy_of_targets_that_are_another_rank_s(device):
    """One of three parts of the vocabulary: 4 to 8 of 12."""
    logits, targets = normals(7, 4), np.array([0, 3, 4, 5, 7, 8, 11])
    compare(device, cross_entropy, logits, targets, start=4)


# --- 16-bit floats


HALF_ROWS = normals(7, 6)
OF_HALVES = {
    "relu": (relu, [HALF_ROWS]),
    "gelu": (gelu, [HALF_ROWS]),
    "gelu without slope": (gelu, [HALF_ROWS, False]),
    "silu_gate": (silu_gate, [HALF_ROWS, normals(7, 6, seed=1)]),
    "layer_norm": (layer_norm, [HALF_ROWS, normals(6, seed=1), normals(6, seed=2), 1e-5]),
    "layer_norm_backward": (layer_norm_backward, [HALF_ROWS, HALF_ROWS, WIDE(normals(7) ** 2), normals(6)]),
    "layer_norm_backward_parameters": (layer_norm_backward_parameters, [HALF_ROWS, HALF_ROWS]),
    "rms_norm": (rms_norm, [HALF_ROWS, normals(6, seed=1), 1e-5]),
    "rms_norm_backward": (rms_norm_backward, [HALF_ROWS, HALF_ROWS, WIDE(normals(7) ** 2), normals(6)]),
    "rotate": (rotate, [normals(2, 3, 4, 6), (WIDE(normals(3, 3)), WIDE(normals(3, 3, seed=1))), True]),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("case", OF_HALVES)
def test_kernels_round_once_what_float32_gives(case, half, device):
    """They read and write 16-bit floats, in as many launches as float32."""
    function, arguments = OF_HALVES[case]
    dtype = dtype_of(half)

    def placed(x, wide):
        if isinstance(x, tuple):
            return tuple(placed(each, wide) for each in x)
        if not isinstance(x, np.ndarray):
            return x
        x = x if isinstance(x, WIDE) else x.astype(dtype).astype(np.float32 if wide else dtype)
        return device.asarray(x.view(np.ndarray))

    results = []
    for wide in (True, False):
        given = [placed(x, wide) for x in arguments]
        events().clear()
        result = function(*given)
        results.append((result if isinstance(result, tuple) else (result,), events().launches))
    (expected, launches), (found, launches_of_halves) = results
    assert launches_of_halves == launches
    for x, right in zip(found, expected):
        if right is not None and not isinstance(right, tuple):
            right = device.to_host(right)
            np.testing.assert_array_equal(device.to_host(x), right.astype(x.dtype))


def test_rows_of_halves_are_added_to_a_wide_table(device):
    table, indices, rows = np.zeros((4, 3), np.float32), np.array([1, 3, 1]), normals(3, 3).astype(dtype_of("bfloat16"))
    there = device.asarray(table)
    add_rows(there, device.asarray(indices), device.asarray(rows))
    add_rows(table, indices, rows)
    close(device.to_host(there), table, 1e-6)


# --- products of 16-bit floats

OPERANDS = {
    "rows": ((5, 4), (4, 3)),
    "one row": ((1, 4), (4, 3)),
    "one column": ((5, 4), (4, 1)),
    "no terms": ((5, 0), (0, 3)),
    "no rows": ((0, 4), (4, 3)),
    "batches": ((2, 3, 5, 4), (2, 3, 4, 6)),
    "a matrix for all": ((2, 3, 5, 4), (4, 6)),
    "a batch for some": ((2, 1, 5, 4), (1, 3, 4, 6)),
}
VIEWS = {
    "as is": lambda x, xp: x,
    "transposed": lambda x, xp: xp.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "some columns": lambda x, xp: xp.concatenate([x, x], axis=-1)[..., : x.shape[-1]],
    "every other column": lambda x, xp: xp.repeat(x, 2, axis=-1)[..., ::2],
    "heads": lambda x, xp: xp.ascontiguousarray(xp.moveaxis(x, 0, -2)).transpose(-2, *range(x.ndim - 2), -1),
}


@in_turn(3, view=list(VIEWS), half=list(HALVES), shapes=list(OPERANDS))
def test_products_sum_in_float32(shapes, half, view, device):
    a, b = (normals(*shape, seed=seed).astype(dtype_of(half)) for seed, shape in enumerate(OPERANDS[shapes]))
    expected = a.astype(np.float64) @ b.astype(np.float64)
    there = [VIEWS[view](device.asarray(x), device.xp) for x in (a, b)]
    for out, dtype in ((None, None), (None, np.float32), (device.empty(expected.shape, np.float32), None)):
        y = matmul(*there, out=out, dtype=dtype)
        assert y.dtype == (a.dtype if out is None and dtype is None else np.float32)
        assert out is None or y is out
        close(device.to_host(y), expected, 1e-6 if y.dtype == np.float32 else 2.0**-8)
