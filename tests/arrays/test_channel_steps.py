"""Batch norm of one block, put together of its steps, against PyTorch; its compiled loops against NumPy's text."""

import numpy as np
import pytest

from spmd_engine.arrays.normalization import (
    channel_gradients,
    channel_squares,
    channel_sums,
    normalized_gradient,
    scale_channels,
)
from support.numerics import assert_gradient, normals
from test_golden_images import GOLDEN, close, names


def batch_norm(x, scale, shift, epsilon, dy):
    """y and the gradients dx, dscale, dshift."""
    n = max(1, x.size // max(1, x.shape[-1]))
    mean = channel_sums(x) / n
    inverse = 1 / np.sqrt(channel_squares(x, mean) / n + epsilon)
    y = scale_channels(x, mean, inverse * scale, shift)
    dscale, dshift = channel_gradients(dy, x, mean, inverse)
    return y, normalized_gradient(dy, x, mean, inverse, scale, dscale / n, dshift / n), dscale, dshift


@pytest.mark.parametrize("name", names("batch_norm"))
def test_against_pytorch(name):
    of = {key.split("/")[2]: value for key, value in GOLDEN.items() if key.startswith(f"batch_norm/{name}/")}
    found = batch_norm(of["x"], of["scale"], of["shift"], of["epsilon"], of["dy"])
    for each, expected in zip(found, ("y", "dx", "dscale", "dshift"), strict=True):
        close(each, of[expected])


@pytest.mark.parametrize("shape", [(300, 700), (2, 3, 4, 5), (0, 3, 3, 4), (2, 3, 3, 0)], ids=str)
def test_the_gradient_is_that_of_batch_norm(shape):
    x, dy = normals(*shape), normals(*shape, seed=1)
    scale, shift = normals(shape[-1], seed=2), normals(shape[-1], seed=3)
    y, dx, dscale, dshift = batch_norm(x, scale, shift, 1e-3, dy)
    assert y.shape == dx.shape == shape
    assert_gradient(lambda x: (batch_norm(x, scale, shift, 1e-3, dy)[0] * dy).sum(), x, dx, tolerance=1e-7)
    assert_gradient(lambda scale: (batch_norm(x, scale, shift, 1e-3, dy)[0] * dy).sum(), scale, dscale, tolerance=1e-7)
    np.testing.assert_allclose(dshift, dy.sum(axis=tuple(range(len(shape) - 1))), atol=1e-10)
