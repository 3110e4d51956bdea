"""Functions of arrays that are only shapes: what they return has NumPy's shapes and dtypes."""

import numpy as np
import pytest

from spmd_engine.arrays.meta.functions import ShapedArray
from spmd_engine.arrays.meta.meter import Meter, metered
from spmd_engine.errors import UsageError

X, Y = np.ones((2, 6, 4), np.float32), np.ones((4, 6), np.float32)
windows = np.lib.stride_tricks.sliding_window_view

CALLS = {
    "pad: each dim": lambda x, y: np.pad(x, ((0, 0), (2, 1), (0, 3))),
    "pad: all dims": lambda x, y: np.pad(x, 2, mode="edge"),
    "pad: by axis": lambda x, y: np.pad(x, {-2: (2, 1), 0: 3}),
    "roll": lambda x, y: np.roll(x, 1, axis=1),
    "flip": lambda x, y: np.flip(x, 1),
    "tile": lambda x, y: np.tile(y, (3, 1, 2)),
    "tile: fewer": lambda x, y: np.tile(x, 2),
    "tril, triu": lambda x, y: np.tril(x) + np.triu(x, 1),
    "diff": lambda x, y: np.diff(x, axis=1),
    "outer": lambda x, y: np.outer(x, y),
    "tensordot": lambda x, y: np.tensordot(x, y, 1),
    "tensordot: dims": lambda x, y: np.tensordot(x, y, ([1, 2], [1, 0])),
    "squeeze": lambda x, y: np.squeeze(x[:, :1], 1),
    "diagonal": lambda x, y: np.diagonal(x, axis1=1, axis2=2),
    "windows": lambda x, y: windows(x, 3, axis=1),
    "hstack, vstack": lambda x, y: np.hstack([np.vstack([y, y[:2]]), y.reshape(6, 4)]),
    "vstack: of one dim": lambda x, y: np.vstack([y[0], y[1]]),
    "split": lambda x, y: np.split(x, 3, axis=1)[-1],
    "split: negative dim": lambda x, y: np.split(x, [1, 3], axis=-1)[1],
    "array_split": lambda x, y: np.array_split(x, 4, axis=1)[0],
    "ufunc.outer": lambda x, y: np.subtract.outer(x, y),
    "on zeros: average": lambda x, y: np.average(x, axis=1),
    "on zeros: kron": lambda x, y: np.kron(x[0], y),
    "on zeros: median": lambda x, y: np.median(x, axis=(0, 2)),
    "on zeros: fft": lambda x, y: np.fft.rfft(x, axis=1),
    "on zeros: list": lambda x, y: np.column_stack([x[0], y.T]),
    "on zeros: several": lambda x, y: np.linalg.svd(y, full_matrices=False)[2],
    "on zeros: select": lambda x, y: np.select([x > 0, x < 0], [x, 2 * x]),
    "norm": lambda x, y: np.linalg.norm(x, axis=-1, keepdims=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_shapes_and_dtypes_are_numpys(call):
    with metered(Meter()):
        found = call(ShapedArray.new(X.shape, X.dtype), ShapedArray.new(Y.shape, Y.dtype))
    expected = call(X, Y)
    assert isinstance(found, ShapedArray)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("call", [np.argsort, lambda x, axis: np.argpartition(x, 2, axis)])
def test_indices_have_values(call):
    """They may be used as indices, so they are those of zeros: an order of all."""
    with metered(Meter()) as meter:
        found = call(ShapedArray.new(X.shape, X.dtype), 1)
    assert found.shape == X.shape and (np.sort(found, 1) == np.arange(6)[:, None]).all()
    assert meter.notes


def test_one_that_only_values_tell_is_refused():
    with metered(Meter()), pytest.raises(UsageError, match=r"numpy\.unique needs the values .*test_shaped\.py:\d+\)"):
        np.unique(ShapedArray.new(X.shape, X.dtype))
