"""The fused attention kernels, run by threads on the host, against the blocked NumPy text: all options, any shape."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ml_dtypes import bfloat16

from spmd_engine.arrays.attention import causal_attention, causal_attention_backward
from spmd_engine.arrays.cuda import CudaFunctions
from spmd_engine.arrays.flash_attention import KERNELS, FlashAttention, Variant, source
from support.fake_cupy import events
from support.numerics import normals
from support.threads_on_host import KernelError, ThreadedKernel

TOLERANCE = {"float32": 1e-5, "float64": 1e-11}  # of the largest number, or of 1
FORWARD, BACKWARD = ["flash_attention"], ["flash_attention_queries", "flash_attention_keys"]


def there(device, *arrays):
    return [device.asarray(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x for x in arrays]


def compare(device, q, k, v, *seen, dtype=None, keys=slice(None)):
    """Forward, and the backward to the keys of a slice, of NumPy, with halves widened, and of the device: each kernel
    is launched once, and nothing else."""
    wide = lambda *arrays: [x.astype(np.float32) if x.itemsize == 2 else x for x in arrays]
    rounded = lambda *arrays: [x.astype(q.dtype if dtype is None else dtype) for x in arrays]
    dy = normals(*q.shape, seed=9).astype(q.dtype)
    *places, apart, window, cap = seen
    apart_there = apart and tuple(there(device, *apart))
    y, log_sums = causal_attention(*wide(q, k, v), *seen)
    arrays, places_there = there(device, q, k, v), there(device, *places)
    events().clear()
    results = causal_attention(*arrays, *places_there, apart_there, window, cap, dtype=dtype)
    assert events().launches == FORWARD and not events().syncs
    part = (k[:, keys], v[:, keys]), places[1][keys], apart and (apart[0], apart[1][:, keys])
    saved = y.astype(q.dtype), log_sums
    arrays = wide(dy, q, *part[0], saved[0])
    gradients = causal_attention_backward(*arrays, log_sums, places[0], *part[1:], window, cap)
    arrays = there(device, dy, q, *part[0], *saved, places[0], part[1])
    apart_there = apart and tuple(there(device, *part[2]))
    events().clear()
    found = causal_attention_backward(*arrays, apart_there, window, cap, dtype=dtype)
    assert events().launches == BACKWARD and not events().syncs
    for result, right in zip((*results, *found), (*rounded(y), log_sums, *rounded(*gradients))):
        yield device.to_host(result), right


def close(pairs, tolerance):
    for result, right in pairs:
        assert (result.shape, result.dtype) == (right.shape, right.dtype)
        largest = np.abs(right[np.isfinite(right)]).max(initial=1.0)
        np.testing.assert_allclose(result, right, rtol=0, atol=tolerance * largest)


def drawn(seed, widest, dtype):
    """Operands and options of ``causal_attention``."""
    rng = np.random.default_rng(seed)
    t, heads, shared = rng.integers(1, 150), rng.integers(1, 4), rng.integers(0, 4)
    s, width = rng.integers(1, t + 1), rng.integers(1, widest + 1)
    keys = np.sort(rng.choice(2 * t, t, replace=False))
    positions = np.sort(rng.choice(keys, s, replace=False))
    shape = (2, s, heads, shared, width) if shared else (2, s, heads, width)
    q, k, v = (normals(*each, seed=seed, dtype=dtype) for each in (shape, *[(2, t, heads, width)] * 2))
    apart = window = cap = None
    if rng.random() < 0.5:
        documents = np.sort(rng.integers(0, rng.integers(1, 6), (2, keys[-1] + 1)))
        apart = documents[:, positions], documents[:, keys]
    if rng.random() < 0.5:
        window = int(rng.integers(1, 2 * t))
    if rng.random() < 0.5:
        cap = float(rng.uniform(1, 20))
    return q, k, v, positions, keys, apart, window, cap


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.soak] * (n > 5)) for n in range(12)])
def test_any_shape_and_options(seed, cuda):
    for dtype, widest in ("float64", 64), ("float32", 128):
        close(compare(cuda, *drawn(seed, 32 if seed % 2 else widest, dtype)), TOLERANCE[dtype])


@pytest.mark.parametrize("options", [(20, None), (None, 5.0)])
def test_whole_sequences(options, cuda):
    q, k, v = (normals(2, 130, 2, 64, seed=seed) for seed in range(3))
    close(compare(cuda, q, k, v, np.arange(130), np.arange(130), None, *options), 1e-11)


def test_gradients_of_some_keys_alone(cuda):
    """y and log_sums are those of more keys: what a ring relies on."""
    q, k, v = normals(2, 20, 2, 3, 8), normals(2, 90, 2, 8, seed=1), normals(2, 90, 2, 8, seed=2)
    places = np.arange(70, 90), np.arange(90)
    for keys in slice(0, 33), slice(33, 90):
        close(compare(cuda, q, k, v, *places, None, None, None, keys=keys), 1e-11)


def test_strided_operands_are_not_copied(cuda):
    packed = cuda.asarray(normals(2, 70, 3, 2, 8))
    q, k, v = (packed[:, :, i] for i in range(3))
    positions = cuda.xp.arange(70)
    events().clear()
    y, log_sums = causal_attention(q, k, v, positions, positions)
    by_head = packed.transpose(3, 0, 1, 2, 4)[0]  # one head of q, k, v[b s 3 k], as heads
    causal_attention_backward(y, q, k, v, y, log_sums, positions, positions)
    causal_attention(by_head, by_head, by_head, positions, positions)
    assert events().launches == FORWARD + BACKWARD + FORWARD
    expected = causal_attention(q.memory, k.memory, v.memory, positions.memory, positions.memory)
    close([(y.memory, expected[0]), (log_sums.memory, expected[1])], 1e-11)


def test_large_scores_and_numbers_that_are_not_finite(cuda):
    q, k, v = (normals(1, 9, 2, 4, seed=seed) for seed in range(3))
    close(compare(cuda, 1e3 * q, 1e3 * k, v, np.arange(9), np.arange(9), None, None, None), 1e-8)
    v = np.where(np.arange(4) == 2, v, np.nan)
    close(compare(cuda, q, k, v, np.arange(9), np.arange(9), None, None, None), 1e-11)


# --- 16-bit floats: read and written by the kernels, and computed wide


@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_halves_are_rounded_once(dtype, wide, cuda):
    q, k, v, *seen = drawn(4, 40, "float32")
    halves = [x.astype(dtype) for x in (q, k, v)]
    half = np.finfo(np.float16).eps / 2 if dtype == np.float16 else 2.0**-8
    for result, right in compare(cuda, *halves, *seen, dtype=np.dtype("float32") if wide else None):
        assert (result.shape, result.dtype) == (right.shape, right.dtype)
        step = 0 if right.dtype == np.float32 else 2 * half  # where two sums are on both sides of a middle
        result, right = result.astype(np.float64), right.astype(np.float64)
        np.testing.assert_allclose(result, right, rtol=step, atol=2e-5 * max(1, np.abs(right).max()))


@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
def test_every_number_of_16_bits_is_read_and_written(dtype, cuda):
    """The only key of a query has the weight 1."""
    v = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    v = v[np.isfinite(v.astype(np.float32))]
    v = np.resize(v, (1, 1, -(-v.size // 128), 128))
    y, _ = causal_attention(*there(cuda, np.zeros_like(v), v, v, np.arange(1), np.arange(1)))
    np.testing.assert_array_equal(y.memory.view(np.uint16) & 0x7FFF, v.view(np.uint16) & 0x7FFF)  # -0 becomes 0
    np.testing.assert_array_equal(y.memory.astype(np.float32), v.astype(np.float32))


@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
def test_results_are_rounded_to_nearest_even(dtype, cuda):
    middles = np.arange(0, 1 << 16, 7, dtype=np.uint16).view(dtype).astype(np.float32)
    middles = middles[np.isfinite(middles)]
    with np.errstate(over="ignore"):
        v = np.concatenate([middles * np.float32(1 + step) for step in (2.0**-11, 2.0**-9, 3 * 2.0**-11, 0.3)])
    v = np.resize(np.append(v, [np.inf, np.nan, 1e-40, 65519, 65520, 3.4e38]).astype(np.float32), (1, 1, 40, 128))
    with np.errstate(over="ignore", invalid="ignore"):
        right = v.astype(dtype)
    y, _ = causal_attention(*there(cuda, np.zeros_like(v), v, v, np.arange(1), np.arange(1)), dtype=np.dtype(dtype))
    np.testing.assert_array_equal(y.memory.astype(np.float32), right.astype(np.float32))


# --- which operands they take


@pytest.mark.parametrize("dtype, widest", [("float32", 128), ("float64", 64), ("float16", 128)])
def test_wider_heads_are_products_of_the_library(dtype, widest, cuda):
    for width in widest, widest + 1:
        q = cuda.asarray(normals(1, 3, 1, width).astype(dtype))
        events().clear()
        causal_attention(q, q, q, cuda.xp.arange(3), cuda.xp.arange(3))
        assert ("flash_attention" in events().launches) == (width == widest)


def test_a_variable_switches_them_off(cuda, monkeypatch):
    monkeypatch.setenv("SPMD_FLASH_ATTENTION", "0")
    assert CudaFunctions(cuda.xp).flash_attention is None and cuda.kernels.flash_attention is not None


# --- threads: the kernels do not depend on their order, and need every barrier


def attend(folder, change=lambda text: text, **run):
    """Forward and backward of several tiles in each kernel, on arrays of the host, by kernels whose text is changed."""

    class Changed(ThreadedKernel):
        def __init__(self, text, name):
            super().__init__(change(text), name, folder, checked=True)

        def __call__(self, *args):
            super().__call__(*args, **run)

    names = {name: getattr(np, name) for name in ("empty", "ascontiguousarray", "int64")}
    flash = FlashAttention(SimpleNamespace(RawKernel=Changed, **names))  # type: ignore[arg-type]
    q, k, v = (normals(1, 100, 1, 5, seed=seed) for seed in range(3))
    seen = np.arange(100), np.arange(100), None, None, None, q.dtype
    y, log_sums = flash.forward(q, k, v, *seen, q.dtype)
    return y, log_sums, *flash.backward(q, q, k, v, y, log_sums, *seen)


@pytest.fixture(scope="module")
def folder(library):
    return Path(library._name).parent


@pytest.fixture(scope="module")
def right(folder):
    return attend(folder)


def test_results_do_not_depend_on_the_order_of_threads(right, folder):
    for result, expected in zip(attend(folder, descending=True), right):
        np.testing.assert_array_equal(result, expected)


BARRIERS = ("__syncthreads();", "__syncwarp();")
PLACES = [
    (name, n)
    for name in KERNELS
    for n in range(sum(source(name, Variant(*["double"] * 3, 32))[0].count(barrier) for barrier in BARRIERS))
]


@pytest.mark.soak
@pytest.mark.parametrize("name, number", PLACES)
def test_every_barrier_is_needed(name, number, right, tmp_path):
    def without(text):
        if f" {name}(" not in text:
            return text
        for barrier in BARRIERS:
            text = text.replace(barrier, f"@{barrier}")
        parts = text.split("@")
        parts[number + 1] = parts[number + 1].partition(";")[2]
        return "".join(parts)

    results = [attend(tmp_path, without, descending=descending) for descending in (False, True)]
    assert any(not np.array_equal(x, y) for result in results for x, y in zip(result, right))


# --- the threads themselves


def run(folder, body, x, threads=64, grid=(1, 1, 1)):
    text = f'extern "C" __global__ void small(double *x, long long n) {{\n{body}\n}}'
    ThreadedKernel(text, "small", folder, checked=True)(grid, (threads, 1, 1), (x, len(x)))
    return x


def test_blocks_share_memory_and_warps_shuffle(folder):
    body = """
        __shared__ double turned[64], other[2];
        const int i = threadIdx.x;
        x += 64 * blockIdx.x;
        turned[63 - i] = x[i];
        __syncthreads();
        const double sum = turned[i] + __shfl_xor_sync(0xFFFFFFFFu, turned[i], 1);
        x[i] = sum + __shfl_xor_sync(0xFFFFFFFFu, sum, 16);
        if (i == 0) x[0] = other[1];
    """
    x = np.arange(128.0)
    turned = x.reshape(2, 64)[:, ::-1]
    pairs = turned + turned[:, np.arange(64) ^ 1]
    expected = (pairs + pairs[:, np.arange(64) ^ 16]).ravel()
    expected[[0, 64]] = np.nan  # what nothing was written to
    np.testing.assert_array_equal(run(folder, body, x, grid=(2, 1, 1)), expected)


ERRORS = {
    "if (threadIdx.x < 5) __syncthreads();": "thread 0 waits for its block at line 2, thread 5 has ended",
    "if (threadIdx.x < 5)\n__syncthreads(); else\n__syncthreads();": "block at line 3, thread 5 .* block at line 4",
    "if (threadIdx.x == 5) __syncwarp();": "thread 0 has ended, thread 5 waits for its warp at line 2",
    "if (threadIdx.x < 32) __syncwarp(); else __syncthreads();": "thread 0 has ended, thread 32 waits for its block",
    "x[0] = __shfl_xor_sync(1u, x[0], 1);": "a shuffle of some lanes at line 2",
    "__shared__ double y[4]; y[threadIdx.x % 5] = 1; x[0] = y[0];": "index 4 is outside of its array at line 2",
}


@pytest.mark.parametrize("body", ERRORS)
def test_wrong_kernels_raise(body, folder):
    with pytest.raises(KernelError, match=ERRORS[body]):
        run(folder, body, np.zeros(64))
    run(folder, "__syncthreads();", np.zeros(64))
