"""Functions of arrays that are only shapes: what they return has NumPy's shapes and dtypes."""

import numpy as np
import pytest

from spmd_engine.arrays.meta.functions import ShapedArray
from spmd_engine.arrays.meta.meter import Meter, metered
from spmd_engine.errors import UsageError

X, Y = np.ones((2, 6, 4), np.float32), np.ones((4, 6), np.float32)
IDENTITY = np.eye(4, dtype=np.float32)
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
    "append": lambda x, y: np.append(x, x, axis=1),
    "where": lambda x, y: np.where(x > 0, x, -np.inf),
    "where: known condition": lambda x, y: np.where(np.tril(np.ones((6, 4), bool)), x, 0),
    "where: float64": lambda x, y: np.where(x > 0, x, np.zeros(4)),
    "cumsum": lambda x, y: np.cumsum(x, axis=1) + x.cumsum(2),
    "cumsum: of conditions": lambda x, y: np.cumsum(x > 0, axis=1),
    "cumprod": lambda x, y: np.cumprod(x, axis=1),
    "accumulate": lambda x, y: np.maximum.accumulate(x, axis=1) + np.add.accumulate(x, axis=-1),
    "maximum.reduce": lambda x, y: np.maximum.reduce(x, axis=(0, 2), keepdims=True),
    "logaddexp.reduce": lambda x, y: np.logaddexp.reduce(x, axis=-1),
    "roll: several": lambda x, y: np.roll(x, (1, 2), axis=(0, 1)),
    "take_along_axis": lambda x, y: np.take_along_axis(x, np.zeros((2, 6, 1), int), axis=2),
    "take_along_axis: flat": lambda x, y: np.take_along_axis(x, np.zeros(3, int), axis=None),
    "put_along_axis": lambda x, y: np.put_along_axis(x, np.zeros((2, 6, 1), int), 1.0, axis=2) or x,
    "fill_diagonal, put, place": lambda x, y: (
        np.fill_diagonal(y, 0) or np.put(y, [0], 1.0) or np.place(y, np.ones((4, 6), bool), 1.0) or y
    ),
    "clip": lambda x, y: np.clip(x, 0, None) + x.clip(0, 1) + np.clip(x, a_min=0, a_max=1),
    "clip: float64": lambda x, y: np.clip(x, 0, np.ones(4)),
    "tril of a mask": lambda x, y: np.tril(np.ones_like(y)),
    "einsum: no output": lambda x, y: np.einsum("bij,jk", x, y),
    "einsum: numbers": lambda x, y: np.einsum(x, [0, 1, 2], y, [2, 3], [0, 1, 3]),
    "einsum: numbers, no output": lambda x, y: np.einsum(x, [0, 1, 2], y, [2, 3]),
    "einsum: dots": lambda x, y: np.einsum("...ij,jk", x, y),
    "dot: of three dims": lambda x, y: np.dot(y.T, np.ones((3, 4, 6), np.float32)),
    "vecdot": lambda x, y: np.vecdot(x, x),
    "divmod, modf": lambda x, y: np.divmod(x, 2)[1] + np.modf(x)[0],
    "frexp": lambda x, y: np.frexp(x)[1],
    "concatenate: flat": lambda x, y: np.concatenate([x, y], axis=None),
    "delete, insert": lambda x, y: np.insert(np.delete(x, [1, 2], axis=1), 1, 0.0, axis=2),
    "repeat: counts": lambda x, y: np.repeat(x, [1, 3], axis=0),
    "repeat: flat": lambda x, y: np.repeat(x, 2),
    "inv": lambda x, y: np.linalg.inv(IDENTITY + 0 * x[:, :4]),
    "solve": lambda x, y: np.linalg.solve(IDENTITY + 0 * x[:, :4], x[:, :4, :3]),
    "cholesky, det": lambda x, y: np.linalg.cholesky(IDENTITY + 0 * y[:, :4]) + np.linalg.det(0 * y[:, :4]),
    "attributes": lambda x, y: x.real.mT.flatten() + 0 * x.imag.reshape(-1),
    "a dtype": lambda x, y: x.astype(np.result_type(x, np.float64)),
    "isfinite, all": lambda x, y: np.isfinite(x).all(axis=1),
    "assignment to a mask": lambda x, y: y.__setitem__(y > 0, 0) or y,
    "printed": lambda x, y: f"{x[0, 0, 0]:.3f}" and x,
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


REFUSED = {
    "numpy.unique needs the values": lambda x: np.unique(x),
    "numpy.nonzero needs the values": lambda x: x.nonzero(),
    "numpy.allclose needs the values": lambda x: np.allclose(1.0, 1.0) and np.allclose(x, 1.0),
    "numpy.delete needs the values": lambda x: np.delete(np.ones(3), x),
    "its elements are asked for": lambda x: np.asarray(x),
    "tolist needs its elements": lambda x: x.tolist(),
    "depends on whether it is true": lambda x: 1 if x.sum() > 0 else 2,
    "depends on its value": lambda x: range(int(x.sum())),
    "it selects elements": lambda x: x[x > 0],
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_only_values_tell_is_refused_by_its_line(words):
    with metered(Meter()), pytest.raises(UsageError, match=rf"{words}.*test_shaped\.py:\d+\)"):
        REFUSED[words](ShapedArray.new(X.shape, X.dtype))
