"""Products of every dtype and layout, by every library: against float64. bfloat16 sums in float32 and rounds once."""

import itertools
import os
import threading
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from spmd_engine.arrays import products
from spmd_engine.arrays.backend import CPU
from spmd_engine.arrays.images import conv2d, conv2d_input_gradient, conv2d_weight_gradient
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.arrays.product_libraries import installed
from spmd_engine.arrays.product_libraries.installed import LIBRARIES, load
from spmd_engine.arrays.product_libraries.library import ProductLibrary, blas_threads
from spmd_engine.arrays.products import DTYPES, SIZES, matmul, rounded, size_class
from spmd_engine.arrays.windows import Window
from support.numerics import normals

FLOAT32_AND_BFLOAT16 = [np.dtype(dtype) for dtype in DTYPES.values()]


@pytest.fixture
def use():
    """``products.use`` for every dtype and size class; afterwards NumPy computes again."""
    products.unfit.clear()
    yield lambda library: products.use({(dtype, size): library for dtype in DTYPES for size in SIZES})
    products.use({})


@pytest.fixture(params=LIBRARIES)
def product_library(request, use):
    """An installed library, in use."""
    found = load(request.param)
    if found is None:
        pytest.skip(f"{request.param} is not installed")
    use(found)
    return found


class Doubling(ProductLibrary):
    """A library of float32 results that are twice too large, so that tests can tell who computed."""

    name, version = "doubling", "1"

    def __init__(self, takes=True):
        self.takes, self.calls = takes, 0

    def multiply(self, a, b, out):
        self.calls += 1
        if self.takes:
            np.matmul(2 * a.astype(np.float32), b.astype(np.float32), out=out)
        return self.takes


def matrices(*shape, dtype: Any = np.float32, seed=0):
    return normals(*shape, seed=seed).astype(dtype)


def assert_product(a, b, y, dtype):
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert y.shape == exact.shape
    assert y.dtype == dtype
    tolerance = 2.0**-8 if dtype == bfloat16 else np.finfo(dtype).eps * 8
    if exact.size:
        np.testing.assert_allclose(y.astype(np.float64), exact, rtol=0, atol=tolerance * (1 + np.abs(exact).max()))


def test_rounds_to_nearest_even_and_keeps_nan():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    # Both sides of a tie, the largest finite numbers, NaNs whose upper half alone would be infinite.
    bits[:9] = 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF7F8000, 0x7F800001, 0xFFFFFFFF, 0x80000000, 1
    x = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = x.astype(bfloat16)
    found = rounded(x, bfloat16)
    assert found.dtype == bfloat16
    number = ~np.isnan(x)
    np.testing.assert_array_equal(found.view(np.uint16)[number], expected.view(np.uint16)[number])
    assert np.isnan(found.astype(np.float32)[~number]).all()


@pytest.mark.parametrize("result", [np.float32, np.float64, bfloat16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, bfloat16])
def test_numpy_computes_each_dtype(dtype, result):
    a, b = (normals(5, 7, 7, seed=seed).astype(dtype) for seed in (0, 1))
    out = np.empty((5, 7, 7), result)
    assert matmul(a, b, out=out) is out
    exact = a.astype(np.float64) @ b.astype(np.float64)
    digits = {np.dtype(np.float64): 1e-15, np.dtype(np.float32): 1e-7, np.dtype(bfloat16): 2.0**-8}
    of_sums = digits[np.dtype(np.float32 if dtype == bfloat16 else dtype)]  # in the dtype of the operands
    tolerance = max(of_sums, digits[np.dtype(result)])
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=0, atol=8 * tolerance * np.abs(exact).max())
    np.testing.assert_array_equal(matmul(a, b, dtype=result), out)


def test_a_sum_of_bfloat16_is_not_rounded_on_the_way():
    a = np.ones((1, 4096), bfloat16)
    assert matmul(a, a.T).item() == 4096  # 256 + 1 is 256 in bfloat16


CONFORM = [(name, dtype) for name in LIBRARIES for dtype in FLOAT32_AND_BFLOAT16]
CONFORM += [("numpy", np.dtype(np.float64)), *(("numpy", dtype) for dtype in FLOAT32_AND_BFLOAT16)]
CONFORM += [("cublas", np.dtype(dtype)) for dtype in (bfloat16, np.float16)]


@pytest.mark.parametrize(("name", "dtype"), CONFORM, ids=str)
def test_every_library_computes_products_of_all_layouts(name, dtype, use, request):
    """Each is exact within the dtype of its sums or, rounded once, of its result; NumPy takes what a library refuses.

    A library of your own passes this with a line in ``LIBRARIES``.
    """
    backend: Any = request.getfixturevalue("cuda") if name == "cublas" else CPU
    if name in LIBRARIES:
        if (found := load(name)) is None:
            pytest.skip(f"{name} is not installed")
        use(found)
    shapes = [((2, 3), 5, 7, 9), ((), 1, 40, 90), ((), 70, 80, 33), ((), 0, 3, 4), ((), 3, 0, 4)]
    for (batch, m, k, n), orders in itertools.product(shapes, ("rrr", "trr", "rtr", "ttt", "grr")):

        def ordered(rows, columns, order, seed, kind, batch=batch):
            """By rows; transposed, by columns; or with gaps, every second column of a larger matrix."""
            if order == "t":
                return backend.asarray(matrices(*batch, columns, rows, dtype=kind, seed=seed)).swapaxes(-1, -2)
            step = 2 if order == "g" else 1
            return backend.asarray(matrices(*batch, rows, step * columns, dtype=kind, seed=seed))[..., ::step]

        a, b = ordered(m, k, orders[0], 1, dtype), ordered(k, n, orders[1], 2, dtype)
        operands = backend.to_host(a), backend.to_host(b)
        for result in {accumulated_in(dtype), dtype}:
            out = ordered(m, n, orders[2], 3, result)
            assert matmul(a, b, out=out) is out
            assert_product(*operands, backend.to_host(out), result)
        assert_product(*operands, backend.to_host(matmul(a, b)), dtype)
    if name in LIBRARIES:
        assert products.unfit  # every second column of a matrix, empty ones


def test_a_library_computes_the_same_bits_again_and_in_threads(product_library):
    a, b = matrices(100, 300, dtype=bfloat16), matrices(300, 200, dtype=bfloat16, seed=1)
    first, found = matmul(a, b, dtype=np.float32), []
    if products.unfit:
        pytest.skip("the library has no products of bfloat16 for this processor")
    body = lambda: found.extend([matmul(a, b, dtype=np.float32) for _ in range(20)])  # noqa: E731
    threads = [threading.Thread(target=body) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    assert all(np.array_equal(y, first) for y in found)
    assert not products.unfit


def test_kept_primitives_are_bounded(use, monkeypatch):
    onednn: Any = load("onednn")
    if onednn is None:
        pytest.skip("onednn is not installed")
    monkeypatch.setattr("spmd_engine.arrays.product_libraries.onednn._KEPT", 4)
    use(onednn)
    for n in [*range(1, 8), 1, 2]:
        a, b = matrices(3, 4), matrices(4, n)
        assert_product(a, b, matmul(a, b), np.float32)
    assert len(onednn._local.products) == 4


def test_float64_mixed_dtypes_and_vectors_stay_with_numpy(use):
    use(Doubling())
    x = normals(3, 3)
    np.testing.assert_array_equal(matmul(x, x), x @ x)
    single = x.astype(np.float32)
    np.testing.assert_array_equal(matmul(single, x), single @ x)
    np.testing.assert_array_equal(matmul(single, single[0]), single @ single[0])


def test_size_classes_choose_the_library(use):
    assert {size: size_class(*shape) for size, shape in SIZES.items()} == {size: size for size in SIZES}
    library = Doubling()
    products.use({("float32", "few"): library})
    for m, k, n in [(8, 8, 8), (1, 600, 600), (8, 300, 300), (300, 300, 8), (80, 80, 80), (210, 210, 210)]:
        matmul(matrices(m, k), matrices(k, n))
    assert library.calls == 2


def test_an_output_that_is_an_operand(use):
    use(Doubling())
    x = matrices(4, 4)
    expected = 2 * (x @ x)
    assert matmul(x, x, out=x) is x
    np.testing.assert_allclose(x, expected, rtol=1e-6)


def test_operands_that_a_library_refuses_are_counted(use):
    use(Doubling(takes=False))
    a = matrices(4, 4)
    np.testing.assert_array_equal(matmul(a, a), a @ a)
    assert products.unfit == {"float32 by doubling": 1}
    with pytest.raises(ValueError, match="matmul"):
        matmul(a, matrices(3, 4))


def test_a_forked_child_uses_numpy(use):
    """Threads of a library do not exist in the child, which would wait for them."""
    use(Doubling())
    a = matrices(4, 4)
    if (child := os.fork()) == 0:
        os._exit(int(not np.array_equal(matmul(a, a), a @ a)))
    assert os.waitpid(child, 0)[1] == 0


def test_threads_are_those_of_numpy_not_of_a_blas_loaded_later(monkeypatch):
    pools = [
        {"user_api": "blas", "num_threads": threads, "filepath": f"/site-packages/{package}.libs/libopenblas.so"}
        for package, threads in [("scipy", 8), ("numpy", 1)]
    ]
    monkeypatch.setattr("spmd_engine.arrays.product_libraries.library.threadpool_info", lambda: pools)
    assert blas_threads() == 1


# --- convolutions of bfloat16


@pytest.mark.parametrize("library", ["numpy", "onednn"])
@pytest.mark.parametrize(
    "window",
    [Window(3, 1, 1, 1, 1), Window(3, 2, 1, 1, 1), Window(2, 1, 2), Window(7, 2, 1, 3, 3), Window(3, 1, 1, -1, 0)],
)
def test_convolutions_of_bfloat16_are_rounded_once(window, library, use):
    found: Any = None
    if library != "numpy":
        if (found := load(library)) is None:
            pytest.skip(f"{library} is not installed")
        use(found)
    assert_rounded_once(window, Window(3, 1, 1, 1, 1), (12, 9), 16)
    if library != "numpy" and window.before >= 0:
        assert sum(isinstance(key[0], str) for key in found._local.products) >= 3


@pytest.mark.parametrize(
    "window, lengths, channels",
    [
        (Window(3, 2, 1, 1, 1), (1, 1), 64),
        (Window(4, 3, 1, 1, 2), (2, 2), 16),
        (Window(3, 2, 2, 3, 4), (1, 1), 256),
        (Window(2, 2), (8, 8), 48),
        (Window(4, 2), (12, 6), 112),
    ],
)
def test_convolutions_that_onednn_computes_wrongly_with_amx_are_not_left_to_it(window, lengths, channels, use):
    if (found := load("onednn")) is None:
        pytest.skip("onednn is not installed")
    use(found)
    assert_rounded_once(window, window, lengths, channels)


def assert_rounded_once(rows, columns, lengths, channels):
    """A convolution and its gradients are exact but for the rounding of their results."""
    x = matrices(2, *lengths, channels, dtype=bfloat16)
    w = matrices(rows.size, columns.size, channels, 24, dtype=bfloat16, seed=1)
    shape = 2, rows.outputs(lengths[0]), columns.outputs(lengths[1]), 24
    dy = matrices(*shape, dtype=bfloat16, seed=2)

    def results(x, w, dy):
        return (
            conv2d(x, w, rows, columns),
            conv2d_input_gradient(dy, w, rows, columns, 1, lengths),
            conv2d_weight_gradient(x, dy, rows, columns),
        )

    exact = results(*(each.astype(np.float64) for each in (x, w, dy)))
    for y, expected, dtype in zip(results(x, w, dy), exact, (bfloat16, bfloat16, np.float32), strict=True):
        assert y.dtype == dtype
        rounding = 2.0**-8 if dtype == bfloat16 else 0
        np.testing.assert_allclose(y.astype(float), expected, rtol=rounding, atol=1e-5 * abs(expected).max())


def test_the_newest_installed_library_is_taken(tmp_path, monkeypatch):
    """Links to a library have shorter numbers than its own name, and wheels have copies for links."""
    wheel, system = tmp_path / "lib", tmp_path / "base" / "lib"
    for folder, names in (wheel, ["libdnnl.so", "libdnnl.so.98", "libdnnl.so.98.2"]), (system, ["libdnnl.so.98.10"]):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).touch()
    (system / "libdnnl.so.98").symlink_to("libdnnl.so.98.10")
    monkeypatch.setattr(installed.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(installed.site, "getuserbase", lambda: str(tmp_path / "other"))
    assert installed._installed("libdnnl.so") == str(wheel / "libdnnl.so.98.2")
    monkeypatch.setattr(installed.site, "getuserbase", lambda: str(tmp_path / "base"))
    assert os.path.realpath(str(installed._installed("libdnnl.so"))) == str(system / "libdnnl.so.98.10")
