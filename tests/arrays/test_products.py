"""Products of every dtype and layout equal NumPy's; bfloat16 is summed in float32 and rounded once."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from spmd_engine.arrays.products import matmul, rounded

DTYPES = (np.float32, np.float64, bfloat16)


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


@pytest.mark.parametrize("result", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_of_each_dtype(dtype, result):
    a, b = (np.random.default_rng(seed).standard_normal((5, 7, 7)).astype(dtype) for seed in (0, 1))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    tolerance = max(2.0**-8 if result == bfloat16 else np.finfo(result).eps, 0 if dtype == np.float64 else 2.0**-23)
    out = np.empty(exact.shape, result)
    assert matmul(a, b, out=out) is out
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=0, atol=8 * tolerance * np.abs(exact).max())
    y = matmul(a, b, dtype=result)
    assert y.dtype == result
    np.testing.assert_array_equal(y.astype(np.float64), out.astype(np.float64))
