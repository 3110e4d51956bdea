"""Helpers for the tests of kernels, layers and losses: random arrays, and gradients by finite differences."""

import numpy as np


def normals(*shape, seed=0, dtype=np.float64):
    """A read-only array of standard normal numbers."""
    return frozen(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def frozen(x):
    """``x``, read-only, so that a write to an input raises."""
    x = np.asarray(x)
    x.flags.writeable = False
    return x


def assert_gradient(f, x, gradient, step=1e-5, tolerance=1e-8, directions=3):
    """Assert that ``gradient`` is that of the number ``f(x)``, by central differences in random directions."""
    assert gradient.shape == x.shape
    for seed in range(directions):
        direction = normals(*x.shape, seed=1000 + seed)
        slope = (f(x + step * direction) - f(x - step * direction)) / (2 * step)
        expected = float((gradient * direction).sum())
        scale = np.linalg.norm(gradient) + abs(expected)
        assert abs(slope - expected) <= tolerance * max(scale, 1.0), (slope, expected)
