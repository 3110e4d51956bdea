"""The compiled loops against the NumPy text of the same names: what is asked of CUDA's kernels is asked of them."""

import inspect
import os
import platform
import subprocess
import sys
from mmap import PAGESIZE

import ml_dtypes
import numpy as np
import pytest

import test_cuda_kernels
from spmd_engine import Mesh, run_threads
from spmd_engine.arrays import activations
from spmd_engine.arrays.attention import attend_to_all, attend_to_keys
from spmd_engine.arrays.backend import CPU, backend_of
from spmd_engine.arrays.numba.functions import FastFunctions, fast_functions
from spmd_engine.arrays.numba.object_code import Image, Loops, image_of
from spmd_engine.arrays.rotary import rotation_at
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.models.decoder import GPTSize, gpt
from support.numerics import normals
from test_cuda_kernels import (  # noqa: F401 (they are run here again, on another device)
    TOLERANCE,
    close,
    test_activations,
    test_activations_far_out,
    test_adamw,
    test_attention,
    test_cross_entropy,
    test_cross_entropy_of_masked_tokens_and_large_logits,
    test_cross_entropy_of_targets_that_are_another_rank_s,
    test_gates,
    test_gates_far_out,
    test_layer_norm,
    test_momentum_sgd,
    test_rms_norm,
    test_rotary_positions,
)
from test_cuda_launches import fused_functions

pytest.importorskip("spmd_engine.arrays.numba.kernels")
object_code_of = pytest.importorskip("spmd_engine.arrays.numba.compile").object_code_of


@pytest.fixture(scope="module")
def loops():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPMD_FAST", "1")
        found = fast_functions()
    assert isinstance(found, FastFunctions)
    return found


@pytest.fixture
def device(loops, monkeypatch):
    """Where the other tests' calls go: to the host with its compiled loops, compared with the host without."""

    def compare(_, function, *args, tolerance=None, **options):
        dtype = next(str(x.dtype) for x in args if isinstance(x, np.ndarray))
        copies = [[x.copy() if isinstance(x, np.ndarray) else x for x in args] for _ in range(2)]
        results = []
        for kernels, given in zip((None, loops), copies):
            monkeypatch.setitem(CPU.__dict__, "kernels", kernels)
            returned = function(*given, **options)
            results.append([*(returned if isinstance(returned, tuple) else (returned,)), *given])
        for expected, found in zip(*results):
            if isinstance(expected, np.ndarray):
                assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            if isinstance(expected, (np.ndarray, float)):
                close(found, expected, tolerance or TOLERANCE[dtype])
        return returned

    monkeypatch.setattr(test_cuda_kernels, "compare", compare)
    return CPU


def test_the_exponential_is_exact_to_two_units_in_the_last_place(loops):
    x = np.linspace(-87, 88.3, 1_000_001, dtype=np.float32)
    scores = x[None].copy()
    loops.exponentiate(scores, np.zeros((1, 1), np.float32))
    expected = np.exp(x.astype(np.float64))
    assert (np.abs(scores[0] - expected) <= 2 * np.spacing(expected.astype(np.float32))).all()


def test_the_exponential_far_out(loops):
    scores = np.array([[-np.inf, -1e30, -200, 0, 90, 1e30, np.inf, np.nan]], np.float32)
    loops.exponentiate(scores, np.zeros((1, 1), np.float32))
    np.testing.assert_array_equal(scores, [[0, 0, 0, 1, np.inf, np.inf, np.inf, np.nan]])


@pytest.mark.parametrize("function", fused_functions().values(), ids=lambda f: f.__name__)
def test_they_have_every_function_with_its_signature(function):
    own = inspect.signature(function).parameters.values()
    others = list(inspect.signature(getattr(FastFunctions, function.__name__)).parameters.values())[1:]
    assert [(p.name, p.kind, p.default) for p in others] == [(p.name, p.kind, p.default) for p in own]


def test_what_is_no_number_stays_so(loops):
    spoiled = normals(3, 40, dtype=np.float32).copy()
    spoiled[1, 7] = np.nan
    ones = np.ones(40, np.float32)
    y, slope = loops.gelu(spoiled)
    assert np.isnan(y[1, 7]) and np.isnan(slope[1, 7]) and np.isfinite(y[0]).all()
    assert np.isnan(loops.relu(spoiled)[0][1, 7])
    assert np.isnan(loops.layer_norm(spoiled, ones, ones, 1e-5)[0][1]).all()
    rows = spoiled.copy()
    loops.exponentiate(rows, ones[:1])
    assert np.isnan(rows).sum() == 1


def test_float64_is_left_to_numpy(loops):
    assert loops.takes(np.dtype(np.float32)) and not loops.takes(np.dtype(np.float64))


@pytest.mark.parametrize("shape", [(1, 1, 3, 8), (2, 1, 3, 2, 5), (1, 1, 2, 4, 16)])
def test_one_query_attends_to_few_keys_alike(loops, monkeypatch, shape):
    q, (k, v) = normals(*shape, dtype=np.float32), normals(2, shape[0], 25, shape[2], shape[-1], dtype=np.float32)
    keys, seen = np.zeros((shape[0], 21), np.int64), slice(1, 22)  # beside columns that are not used
    expected, _ = attend_to_keys(*(x.astype(np.float64) for x in (q, k[:, seen], v[:, seen])), keys[:, :1], keys)
    monkeypatch.setitem(CPU.__dict__, "kernels", loops)
    new, room = [x[:, 21:22] for x in (k, v)], [x.copy() for x in (k, v)]
    for array in room:
        array[:, 21] = 0
    np.testing.assert_allclose(attend_to_all(q, *new, *room, seen, None), expected, rtol=1e-4, atol=1e-6)
    for array, x in zip(room, (k, v), strict=True):
        np.testing.assert_array_equal(array, x)


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("pairs", [2, 4])
def test_a_new_query_and_key_are_rotated_as_elsewhere(loops, monkeypatch, neighbours, pairs):
    q, k, v = normals(3, 2, 1, 3, 8, dtype=np.float32)
    rotation = rotation_at(np.array([[5], [9]]), np.linspace(1, 0.01, pairs), q)
    results = []
    for kernels in (None, loops):
        monkeypatch.setitem(CPU.__dict__, "kernels", kernels)
        keys, values = np.ones((2, 2, 7, 3, 8), np.float32)
        y = attend_to_all(q, k, v, keys, values, slice(2, 6), None, (rotation, neighbours))
        results.append((y, keys, values))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(results[1][1][:, 5:6], loops.rotate(k, rotation, neighbours))


def test_a_cache_of_other_shapes_is_refused_before_anything_is_written(loops, monkeypatch):
    monkeypatch.setitem(CPU.__dict__, "kernels", loops)
    q, k, v = normals(3, 2, 1, 8, 4, dtype=np.float32)
    for shape, end in [((2, 7, 4, 4), 6), ((1, 7, 8, 4), 6), ((2, 7, 8, 3), 6)]:
        cache = np.ones((3, *shape), np.float32)
        with pytest.raises(ValueError, match="could not broadcast"):
            attend_to_all(q, k, v, cache[0], cache[1], slice(0, end), None)
        np.testing.assert_array_equal(cache, 1)


def test_a_scale_of_bfloat16_is_that_of_a_norm_in_bfloat16(loops):
    x, scale = normals(6, 4).astype(ml_dtypes.bfloat16), normals(4).astype(ml_dtypes.bfloat16)
    for found, expected in zip(
        loops.rms_norm(x, scale, 1e-5), loops.rms_norm(x, scale.astype(np.float32), 1e-5), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("change", [np.transpose, np.flip, lambda x: x.repeat(2, axis=1)[:, ::2]])
def test_arrays_that_a_loop_does_not_take_are_copied(loops, change):
    """It refuses them, having looked at them itself."""
    x, u = change(normals(6, 4, dtype=np.float32)), normals(*change(normals(6, 4)).shape)  # float64
    scale = np.ones(x.shape[-1], np.float32)
    for found, expected in [
        (loops.gelu(x, False)[0], loops.gelu(x.copy(), False)[0]),
        (loops.silu_gate(x, u)[0], loops.silu_gate(x.copy(), u.astype(np.float32))[0]),
        (loops.rms_norm(x, scale, 1e-5)[0], loops.rms_norm(x.copy(), scale, 1e-5)[0]),
    ]:
        np.testing.assert_array_equal(found, expected)


def train():
    """Losses of some steps, on virtual ranks, in float32."""
    model = gpt(GPTSize(layers=2, width=24, heads=2, context=20, vocabulary=31), dropout=0.1)
    tokens = np.random.default_rng(0).integers(0, 31, (6, 8, 21))

    def body():
        engine, optimizer = LayeredEngine(model, Mesh(data=2), storage=ZeroConfig(zero=1), dtype=np.float32), AdamW()
        losses = []
        for step, batch in enumerate(tokens):
            losses.append(engine.step(batch_of(batch[:, :-1], batch[:, 1:], engine, step=step)))
            optimizer.update(engine, engine.gradients, step=step + 1, rate=1e-2)
        return losses

    return run_threads(body, 2)[0]


def test_a_model_trains_alike(loops, monkeypatch):
    monkeypatch.setitem(CPU.__dict__, "kernels", None)
    expected = train()
    monkeypatch.setitem(CPU.__dict__, "kernels", loops)
    np.testing.assert_allclose(train(), expected, rtol=1e-5)


# --- whether they are used


def test_arrays_of_the_host_go_there(loops, monkeypatch):
    monkeypatch.setitem(CPU.__dict__, "kernels", loops)
    scores = normals(2, 3, dtype=np.float32).copy()
    expected = scores.copy()
    loops.exponentiate(expected, scores[:, :1].copy())
    activations.exponentiate(scores, scores[:, :1].copy())
    np.testing.assert_array_equal(scores, expected)
    assert backend_of(scores).kernels is loops


def test_they_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("SPMD_FAST", "0")
    assert fast_functions() is None


def test_without_numba_numpy_computes(monkeypatch, caplog):
    monkeypatch.setenv("SPMD_FAST", "1")
    monkeypatch.setattr("spmd_engine.arrays.numba.functions.find_spec", lambda _: None)
    assert fast_functions() is None and not caplog.records


@pytest.mark.parametrize("kind", [ImportError, SystemError])
def test_a_numba_that_refuses_is_named(monkeypatch, caplog, tmp_path, kind):
    """Where nothing is kept yet, so that it is needed."""

    class Refusing:
        def find_spec(self, name, path=None, target=None):
            if name == "spmd_engine.arrays.numba.compile":
                raise kind("Numba needs NumPy 2.3 or less")

    monkeypatch.setenv("SPMD_FAST", "1")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, "spmd_engine.arrays.numba.compile", raising=False)
    monkeypatch.delattr("spmd_engine.arrays.numba.compile", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    assert fast_functions() is None
    assert "Numba needs NumPy 2.3 or less" in caplog.text


# --- object code


def test_a_process_that_finds_an_image_loads_no_compiler(loops):
    """``loops`` has seen to it that the code is there."""
    text = """
import sys
import numpy as np
from spmd_engine.arrays.numba.functions import fast_functions
print(fast_functions().relu(np.array([-1, 2], np.float32))[0], *{"numba", "llvmlite"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, "SPMD_FAST": "1"}, capture_output=True, text=True, timeout=60
    )
    linker = "" if platform.machine() == "x86_64" else " llvmlite"
    assert done.stdout.split("\n")[0] == f"[0. 2.]{linker}", done.stderr


def test_an_image_computes_what_llvm_links():
    """A function of any arguments that returns the element of a table at their number, as an int of Python."""
    text = """
@table = internal constant [3 x i64] [i64 5, i64 7, i64 11]
@offset = internal global i64 0
declare i8* @PyLong_FromLongLong(i64)

define i8* @element(i8* %self, i8** %arguments, i64 %count) {
  %place = getelementptr [3 x i64], [3 x i64]* @table, i64 0, i64 %count
  %element = load i64, i64* %place
  %before = load volatile i64, i64* @offset
  %after = add i64 %before, 100
  store volatile i64 %after, i64* @offset
  %sum = add i64 %element, %before
  %result = call i8* @PyLong_FromLongLong(i64 %sum)
  ret i8* %result
}
"""
    code = object_code_of([text])
    for image in image_of(["element"], code), Image(code, {"element": 0}, {}, 0):
        loops = Loops(image)
        assert [loops.element(), loops.element(None), loops.element(0, "1")] == [5, 107, 211]
    assert image_of(["element"], b"no object code") == Image(b"no object code", {"element": 0}, {}, 0)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((np.ones(4, np.float64), np.ones(4, np.float32)), "relu_value: wants contiguous arrays of float32"),
        ((np.ones(8, np.float32)[::2], np.ones(4, np.float32)), "relu_value: wants contiguous arrays"),
        ((np.ones(4, np.float32),), "relu_value: takes 2 arguments"),
    ],
    ids=["a type", "strides", "too few"],
)
def test_a_loop_reads_nothing_that_it_does_not_know(loops, arguments, why):
    with pytest.raises(TypeError, match=why):
        loops._loops.relu_value(*arguments)


def test_a_loop_s_numbers_are_numbers(loops):
    x = np.ones(3, np.float32)
    with pytest.raises(TypeError, match="real number"):
        loops._loops.sgd(x, x, None, 1.0)
    with pytest.raises(TypeError, match="2 dimensions"):
        loops._loops.rms_norm(x, x, 1.0, x, x, x)


def test_code_that_cannot_be_linked_is_an_error_and_no_end():
    with pytest.raises(RuntimeError):
        Loops(Image(b"no object code", {"relu": 0}, {}, 0))
    with pytest.raises(ValueError, match="no_function"):
        Loops(Image(bytes(PAGESIZE + 8), {"relu": 0}, {"no_function": PAGESIZE}, PAGESIZE))


# --- arrays of other shapes and types than the loops have


HOW = {"step": 2, "rate": 0.1, "betas": (0.9, 0.99), "epsilon": 1e-8, "decay": 0.1}


def misfits():
    x, row, rows = (normals(*shape, dtype=np.float32) for shape in ((4, 6), (6,), (4,)))
    block, other = normals(2, 4, 6, dtype=np.float32), normals(2, 4, 5, dtype=np.float32)
    targets = np.zeros(3, np.int64)
    return {
        "layer_norm": (x, row[:5], row, 1e-5),
        "layer_norm_backward": (x, x[:3], rows, row),
        "layer_norm_backward_parameters": (x, x[:3]),
        "rms_norm": (x, row[:5], 1e-5),
        "rms_norm_backward": (x, x[:3], rows, row),
        "rms_norm_backward_scale": (x, x[:3]),
        "silu_gate": (x, row[:5]),
        "rotate": (block, (block[:, :3, :2], block[:, :, :2]), True),
        "softmax_backward": (block, other, block[:, :1]),
        "exponentiate": (x.copy(), rows[:3, None]),
        "scores_of_targets": (x, targets, rows),
        "cross_entropy_gradient": (x.copy(), rows, rows, targets),
    }


@pytest.mark.parametrize(("name", "arrays"), misfits().items(), ids=misfits())
def test_nothing_is_read_beyond_an_array_s_end(loops, name, arrays):
    with pytest.raises(ValueError, match="broadcast"):
        getattr(loops, name)(*arrays)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_nor_is_an_optimizer_s(loops, place):
    arrays = [normals(8, dtype=np.float32).copy() for _ in range(4)]
    arrays[place] = arrays[place][:5]
    with pytest.raises(ValueError, match="broadcast|shape"):
        loops.adamw(*arrays, **HOW)


def test_one_number_for_all_of_a_row(loops):
    x, one = normals(4, 6, dtype=np.float32), np.full(1, 2, np.float32)
    spread = np.full(6, 2, np.float32)
    for found, expected in zip(loops.layer_norm(x, one, one, 1e-5), loops.layer_norm(x, spread, spread, 1e-5)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64], ids=lambda d: np.dtype(d).name)
def test_gradients_of_another_type(loops, dtype):
    p, g, mean, square = np.abs(normals(4, 9, dtype=np.float32)).copy()
    g = g.astype(dtype)
    arrays = [[x.copy() for x in (p, each, mean, square)] for each in (g, g.astype(np.float32))]
    for each in arrays:
        loops.adamw(*each, **HOW)
        loops.momentum_sgd(each[0], each[1], each[2], rate=0.1, momentum=0.9, decay=0.1)
    np.testing.assert_array_equal(arrays[0][0], arrays[1][0])


def test_parameters_of_two_dimensions(loops):
    flat = np.abs(normals(4, 12, dtype=np.float32)).copy()
    tables = flat.reshape(4, 3, 4).copy()
    loops.adamw(*flat, **HOW)
    loops.adamw(*tables, **HOW)
    np.testing.assert_array_equal(tables.reshape(4, 12), flat)


def test_no_update_is_lost_in_a_copy(loops):
    p, g = normals(4, 6, dtype=np.float32).copy(), normals(4, 3, dtype=np.float32)
    with pytest.raises(ValueError, match="not contiguous"):
        loops.momentum_sgd(p[:, ::2], g, None, rate=0.1, momentum=0.0, decay=0.0)


def test_sums_over_a_million_rows_keep_their_digits(loops):
    rows = np.full((1_000_000, 2), 0.1, np.float32)
    for found, of_a_row in zip(loops.layer_norm_backward_parameters(rows, rows), (rows[0] * rows[0], rows[0])):
        np.testing.assert_allclose(found, 1e6 * of_a_row.astype(np.float64), rtol=1e-4)
