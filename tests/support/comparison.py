"""Comparisons of np.testing that are quick where arrays agree: else they are half of what tests of engines cost.

What does not agree at once, NaN, infinity, and other types than plain arrays of numbers go to NumPy's own functions,
which decide, and say what differs.
"""

import numpy as np

PLAIN = (np.ndarray, list, tuple, float)
assert_allclose, assert_array_equal = np.testing.assert_allclose, np.testing.assert_array_equal


def are_close(actual, desired, rtol, atol):
    """Whether finite numbers are as close as NumPy wants them."""
    if type(actual) not in PLAIN or type(desired) not in PLAIN:
        return False
    x, y = np.asarray(actual), np.asarray(desired)
    if x.shape != y.shape or {x.dtype.char, y.dtype.char} - {*"fdFD"}:
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        difference, allowed = abs(x - y), atol + rtol * abs(y)
        return bool((difference <= allowed).all() and (allowed < np.inf).all())


def quick_allclose(actual, desired, rtol=1e-7, atol=0, *more, **options):
    __tracebackhide__ = True
    if not are_close(actual, desired, rtol, atol):
        assert_allclose(actual, desired, rtol, atol, *more, **options)


def quick_array_equal(actual, desired, *more, **options):
    __tracebackhide__ = True
    arrays = type(actual) is np.ndarray and type(desired) is np.ndarray and actual.dtype.kind + desired.dtype.kind
    alike = arrays in ("ff", "ii", "bb", "uu") and actual.shape == desired.shape and actual.dtype == desired.dtype
    if not (alike and (actual == desired).all()):
        assert_array_equal(actual, desired, *more, **options)


def install():
    """Make np.testing compare so in this process."""
    np.testing.assert_allclose, np.testing.assert_array_equal = quick_allclose, quick_array_equal
