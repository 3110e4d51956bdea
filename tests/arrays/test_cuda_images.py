"""The text of image functions runs on a device's arrays as on NumPy's: on pretended ones always, on a GPU if any."""

import numpy as np
import pytest

from spmd_engine.arrays import normalization
from spmd_engine.arrays.images import (
    average_pool,
    average_pool_gradient,
    conv2d,
    conv2d_input_gradient,
    conv2d_weight_gradient,
    max_pool,
    max_pool_gradient,
)
from spmd_engine.arrays.windows import Window
from support.numerics import normals
from test_cuda_kernels import both_dtypes, compare, device, gpu  # noqa: F401 (fixtures)

ROWS, COLUMNS = Window(3, 2, 1, 1, 2), Window(2, 1, 2, 0, 1)


@both_dtypes
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("batch", [3, 0])
def test_convolution(device, monkeypatch, dtype, groups, batch):  # noqa: F811
    monkeypatch.setattr(device, "workspace", 2000)  # of one sample, or two
    x, w = normals(batch, 7, 6, 4, dtype=dtype), normals(3, 2, 4 // groups, 8, dtype=dtype, seed=1)
    y = compare(device, conv2d, x, w, ROWS, COLUMNS, groups)
    dy = normals(*y.shape, dtype=dtype, seed=2)
    compare(device, conv2d_input_gradient, dy, w, ROWS, COLUMNS, groups, (7, 6))
    compare(device, conv2d_weight_gradient, x, dy, ROWS, COLUMNS, groups)


@both_dtypes
def test_pooling(device, dtype):  # noqa: F811
    x = np.round(normals(2, 7, 6, 3, dtype=dtype))
    y, _ = compare(device, max_pool, x, ROWS, COLUMNS)
    dy, (_, chosen) = normals(*y.shape, dtype=dtype, seed=1), max_pool(x, ROWS, COLUMNS)
    compare(device, max_pool_gradient, dy, chosen, ROWS, COLUMNS, (7, 6))
    for counted in (True, False):
        compare(device, average_pool, x, ROWS, COLUMNS, counted)
        compare(device, average_pool_gradient, dy, ROWS, COLUMNS, counted, (7, 6))


@both_dtypes
def test_channels(device, dtype):  # noqa: F811
    x, dy, row = normals(2, 5, 7, 3, dtype=dtype), normals(2, 5, 7, 3, dtype=dtype, seed=1), normals(3, dtype=dtype)
    compare(device, normalization.channel_sums, x)
    compare(device, normalization.channel_squares, x, row)
    compare(device, normalization.scale_channels, x, row, row, row)
    compare(device, normalization.channel_gradients, dy, x, row, row)
    compare(device, normalization.normalized_gradient, dy, x, row, row, row, row, row)
