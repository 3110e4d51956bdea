"""Convolutions and pooling against PyTorch: vectors that scripts/make_golden_convolution.py made."""

from pathlib import Path

import numpy as np
import pytest

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

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "convolution.npz"))


def names(kind):
    return sorted({key.split("/")[1] for key in GOLDEN if key.startswith(f"{kind}/")})


def case(kind, name):
    """The arrays of a case by name, and its windows."""
    prefix = f"{kind}/{name}/"
    arrays = {key.removeprefix(prefix): value for key, value in GOLDEN.items() if key.startswith(prefix)}
    return arrays, *(Window(*map(int, numbers)) for numbers in arrays["windows"])


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", names("conv2d"))
def test_convolution(name):
    of, rows, columns = case("conv2d", name)
    groups = int(of["groups"])
    close(conv2d(of["x"], of["w"], rows, columns, groups), of["y"])
    close(conv2d_input_gradient(of["dy"], of["w"], rows, columns, groups, of["x"].shape[1:3]), of["dx"])
    close(conv2d_weight_gradient(of["x"], of["dy"], rows, columns, groups), of["dw"])


@pytest.mark.parametrize("name", names("max_pool"))
def test_max_pool(name):
    of, rows, columns = case("max_pool", name)
    y, chosen = max_pool(of["x"], rows, columns)
    close(y, of["y"])
    close(max_pool_gradient(of["dy"], chosen, rows, columns, of["x"].shape[1:3]), of["dx"])


@pytest.mark.parametrize("name", names("average_pool"))
def test_average_pool(name):
    of, rows, columns = case("average_pool", name)
    counted = bool(of["count_include_pad"])
    close(average_pool(of["x"], rows, columns, counted), of["y"])
    close(average_pool_gradient(of["dy"], rows, columns, counted, of["x"].shape[1:3]), of["dx"])
