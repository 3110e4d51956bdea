"""The quick comparisons of ``support/comparison.py`` pass what NumPy's pass, and fail what those fail."""

from itertools import product

import numpy as np
import pytest

from support import comparison

NAN, INF = float("nan"), float("inf")
NUMBERS = [0.0, 1.0, 1 + 1e-9, 1 + 1e-6, 1e308, -1e308, NAN, INF]
OTHERS = [np.ones(2), np.ones((2, 1)), np.ones(2, int), np.ones(2, np.uint8), [1.0, 1.0], [True, True], 1.0, None]
OTHERS += [np.ones(2, complex), np.ones(2, np.float16), np.array(["1", "1"]), np.zeros((0, 2)), np.ones(0)]
CLOSE = comparison.quick_allclose, comparison.assert_allclose
EQUAL = comparison.quick_array_equal, comparison.assert_array_equal


def passes(compare, *arguments, **options):
    try:
        with np.errstate(all="ignore"):
            compare(*arguments, **options)
    except Exception:
        return False
    return True


def assert_alike(x, y, tolerances):
    for rtol, atol in tolerances:
        quick, slow = (passes(compare, x, y, rtol=rtol, atol=atol) for compare in CLOSE)
        assert quick == slow, (x, y, rtol, atol)
    quick, slow = (passes(compare, x, y) for compare in EQUAL)
    assert quick == slow, (x, y)


@pytest.mark.parametrize("dtype", [np.float32, complex])
def test_numbers_are_close_or_not_as_numpy_says(dtype):
    with np.errstate(over="ignore"):
        arrays = [np.array([1, x]).astype(dtype) for x in NUMBERS]
    for x, y in product(arrays, arrays):
        assert_alike(x, y, [(1e-8, 0), (0, 1e-8)])


def test_other_shapes_and_types_are_left_to_numpy():
    for x, y in product(OTHERS, OTHERS):
        assert_alike(x, y, [(1e-7, 0)])


def test_a_difference_is_told_as_numpy_tells_it():
    with pytest.raises(AssertionError, match="about w(.|\n)*Max absolute difference among violations: 1"):
        np.testing.assert_allclose(np.zeros(3), np.ones(3), err_msg="about w")
    assert np.testing.assert_allclose is comparison.quick_allclose
