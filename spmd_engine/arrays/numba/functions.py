"""The functions marked ``@fused`` as calls of compiled loops, for float32 arrays on the host."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from spmd_engine.arrays.factors import OF_HALVES, adamw_factors

#: Functions whose arrays, other than statistics and parameters, may be bfloat16.
_OF_BFLOAT16 = OF_HALVES | {"products_of_rows", "kept_where"}
_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(bfloat16)
_NO_PAIRS = np.empty((1, 0), np.float32)
_SUMMED = 1024  # rows that are added one by one: a million would lose two more digits

logger = logging.getLogger(__name__)


def fast_functions() -> FastFunctions | None:
    """The compiled functions, where Numba is installed and SPMD_FAST is not 0; else None: NumPy computes."""
    loops = compiled_loops("kernels")
    return FastFunctions(loops) if loops else None


def loops_are_there() -> bool:
    """Whether compiled loops can be loaded; loads nothing."""
    return os.environ.get("SPMD_FAST", "1") != "0" and find_spec("numba") is not None


def compiled_loops(module: str) -> Any:
    """The loops of a module of this package, as functions; None without Numba, and with SPMD_FAST=0."""
    if not loops_are_there():
        return None
    try:
        from spmd_engine.arrays.numba.object_code import loaded

        return loaded(module)
    except (ImportError, SystemError, RuntimeError, ValueError) as error:  # Numba follows NumPy with a delay
        logger.warning("Numba is installed, but cannot be used (%s): NumPy computes instead", error)
        return None


class FastFunctions:
    """Each function has the name, signature and result of its NumPy version, which is documented."""

    def __init__(self, loops, empty: Callable[..., Any] = np.empty) -> None:
        """``empty`` makes results, of a shape and a dtype."""
        self._loops, self._empty = loops, empty

    def takes(self, dtype: np.dtype, name: str = "") -> bool:
        """Float32, the dtype of fast training, and bfloat16 for the functions that round their results; NumPy computes
        float64."""
        return dtype == _FLOAT32 or (dtype == _BFLOAT16 and name in _OF_BFLOAT16)

    def _run(self, name: str, x: np.ndarray, *others: Any) -> None:
        """Run a loop on ``x`` and other arrays. It refuses those that it cannot take: only then are they copied."""
        loop = getattr(self._loops, name) if x.dtype is _FLOAT32 else loop_for(self._loops, name, x)
        try:
            loop(x, *others)
        except TypeError:
            loop(*(_taken(y, x.dtype) if hasattr(y, "dtype") else y for y in (x, *others)))

    def round_to_bfloat16(self, x, out=None):
        """``x`` as bfloat16, in contiguous ``out`` if given."""
        x = contiguous(x)
        y = self._empty(x.shape, _BFLOAT16) if out is None else out
        self._loops.round_to_bfloat16(x, y.view(np.int16))
        return y

    def change_halves(self, name, x, y):
        """x += y ("add_halves") or x *= y ("multiply_halves"), of bfloat16, y shaped as x or its last dims; False if
        the loop does not take these arrays."""
        alike = x.dtype == y.dtype == bfloat16 and x.flags.c_contiguous and y.ndim
        if not alike or y.shape != x.shape[x.ndim - y.ndim :]:
            return False
        if x.size:
            halves = (z.view(np.int16).reshape(-1, prod(y.shape)) for z in (x, np.ascontiguousarray(y)))
            getattr(self._loops, name)(*halves)
        return True

    def kept_where(self, x, flags):
        """x · flags, in the dtype of ``x``."""
        y = self._empty(x.shape, x.dtype)
        self._run("kept_where", x, np.ascontiguousarray(np.broadcast_to(flags, x.shape)), y)
        return y

    # Activations

    def relu(self, z, want_slope=True):
        return self._activation("relu", z, np.bool_ if want_slope else None)

    def gelu(self, z, want_slope=True):
        return self._activation("gelu", z, z.dtype if want_slope else None)

    def _activation(self, name, z, slope_dtype):
        y = self._empty(z.shape, z.dtype)
        if slope_dtype is None:
            self._run(f"{name}_value", z, y)
            return y, None
        slope = self._empty(z.shape, slope_dtype)
        self._run(name, z, y, slope)
        return y, slope

    def silu_gate(self, z, u, want_slopes=True):
        shape, dtype = z.shape, z.dtype
        u, h = u if u.shape == shape else _spread(u, shape, dtype), self._empty(shape, dtype)
        if not want_slopes:
            self._run("silu_gate_value", z, u, h)
            return h, None
        slopes = self._empty(shape, dtype), self._empty(shape, dtype)
        self._run("silu_gate", z, u, h, *slopes)
        return h, slopes

    # Rotary positions

    def rotate(self, x, rotation, neighbours, *, back=False):
        cosine, sine = rotation
        if cosine.shape[:-1] != x.shape[:2]:
            shape = (*x.shape[:2], cosine.shape[-1])
            cosine, sine = _spread(cosine, shape), _spread(sine, shape)
        y = self._empty(x.shape, x.dtype)
        self._run("rotate_neighbours" if neighbours else "rotate_halves", x, cosine, -sine if back else sine, y)
        return y

    # Norms

    def _norm_backward(self, name, dy, normal, inverse, scale):
        dx, rows = self._empty(dy.shape, dy.dtype), _spread(inverse, dy.shape[:-1])
        self._run(name, dy, _spread(normal, dy.shape, dy.dtype), rows, _spread(scale, dy.shape[-1:]), dx)
        return dx

    def layer_norm(self, x, scale, shift, epsilon):
        shape, dtype = x.shape, x.dtype
        results = self._empty(shape, dtype), self._empty(shape, dtype), self._empty(shape[:-1], _FLOAT32)
        self._run("layer_norm", x, _spread(scale, shape[-1:]), _spread(shift, shape[-1:]), epsilon, *results)
        return results

    def layer_norm_backward(self, dy, normal, inverse, scale):
        return self._norm_backward("layer_norm_backward", dy, normal, inverse, scale)

    def layer_norm_backward_parameters(self, dy, normal):
        sums = _sums_over_rows(loop_for(self._loops, "layer_norm_backward_parameters", dy), 2, dy, normal)
        return sums[0], sums[1]

    def rms_norm(self, x, scale, epsilon):
        shape, dtype = x.shape, x.dtype
        results = self._empty(shape, dtype), self._empty(shape, dtype), self._empty(shape[:-1], _FLOAT32)
        self._run("rms_norm", x, _spread(scale, shape[-1:]), epsilon, *results)
        return results

    def rms_norm_backward(self, dy, normal, inverse, scale):
        return self._norm_backward("rms_norm_backward", dy, normal, inverse, scale)

    def rms_norm_backward_scale(self, dy, normal):
        return _sums_over_rows(loop_for(self._loops, "rms_norm_backward_scale", dy), 1, dy, normal)[0]

    # Optimizers

    def adamw(self, p, g, mean, square, *, step, rate, betas, epsilon, decay, scale=1.0):
        factors = adamw_factors(step=step, rate=rate, betas=betas, epsilon=epsilon, decay=decay, scale=scale)
        self._loops.adamw(_inplace(p), _spread(g, p.shape), _state(mean, p), _state(square, p), *factors)

    def momentum_sgd(self, p, g, velocity, *, rate, momentum, decay, scale=1.0):
        kept = 1.0 - rate * decay
        if velocity is None:
            self._loops.sgd(_inplace(p), _spread(g, p.shape), scale * rate, kept)
        else:
            self._loops.momentum_sgd(_inplace(p), _spread(g, p.shape), _state(velocity, p), scale, momentum, rate, kept)

    # Softmax

    def exponentiate(self, scores, shift):
        if scores.ndim != 2:  # attention's have ``exponentiate_keys``
            return NotImplemented
        return _in_place(self._loops.exponentiate_rows, scores, _spread(shift, (len(scores), 1)))

    def softmax_backward(self, ds, p, projection):
        ds[...] = self.softmax_gradient(contiguous(ds), _spread(p, ds.shape), projection, 1.0, ds.dtype)

    # Softmax over the keys of a block's scores[... t s], contiguous float32 (``attention``)

    def softmax_over_keys(self, scores, scale, dtype):
        p, shape = self._empty(scores.shape, dtype), (*scores.shape[:-2], scores.shape[-1])
        top, sums = self._empty(shape, scores.dtype), self._empty(shape, scores.dtype)
        loop_for(self._loops, "softmax_over_keys", p)(scores, scale, p, top, sums)
        return p, top, sums

    def products_of_rows(self, x, y):
        sums = self._empty(x.shape[:-1], _FLOAT32)
        self._run("products_of_rows", x, y, sums)
        return sums

    def exponentiate_keys(self, scores, scale, shift, dtype):
        p = self._empty(scores.shape, dtype)
        loop_for(self._loops, "exponentiate_columns", p)(scores, scale, _of_columns(shift, scores), p)
        return p

    def softmax_gradient(self, ds, p, projection, scale, dtype):
        y = self._empty(ds.shape, dtype)
        loop_for(self._loops, "softmax_backward", y)(ds, p, _of_columns(projection, ds), scale, y)
        return y

    def attend_to_all(self, q, k, v, keys, values, columns, rope):
        (cosine, sine), neighbours = rope or ((_NO_PAIRS, _NO_PAIRS), False)
        first, end, pairs = columns.start, columns.stop, cosine.shape[-1]
        y, scores = self._empty(q.shape, q.dtype), self._empty(end - first, q.dtype)
        apart, scale = 1 if neighbours else pairs, q.shape[-1] ** -0.5
        rows = len(keys), *keys.shape[2:]  # of one column: the loop itself does not check where it writes
        if (len(k), *k.shape[2:]) != rows or v.shape != k.shape or values.shape != keys.shape or end > keys.shape[1]:
            return NotImplemented
        if q.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1] or (pairs and len(cosine) != len(q)):
            return NotImplemented
        try:
            self._loops.attend_to_all(q, k, v, cosine, sine, apart, keys, values, first, end, scale, scores, y)
        except TypeError:  # for the arrays that other loops copy, of which this one changes some
            return NotImplemented
        return y

    def scores_of_targets(self, scores, targets, top):
        result = self._empty(len(targets), scores.dtype)
        rows = scores.shape[:1]
        self._loops.scores_of_targets(contiguous(scores), _indices(targets, rows), _spread(top, rows), result)
        return result

    def cross_entropy_gradient(self, p, sums, weights, targets):
        rows = p.shape[:1]
        others = _spread(sums, rows), _spread(weights, rows), _indices(targets, rows)
        _in_place(self._loops.cross_entropy_gradient, p, *others)


def loop_for(loops: Any, name: str, x: np.ndarray) -> Callable[..., None]:
    """The loop of this name for arrays such as ``x``: bfloat16 or float32."""
    if x.dtype != _BFLOAT16:
        return getattr(loops, name)
    loop = getattr(loops, f"{name}_bfloat16")
    return lambda *arguments: loop(*(y.view(np.int16) if _is_bfloat16(y) else y for y in arguments))


def _is_bfloat16(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == _BFLOAT16


def contiguous(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """``x`` contiguous, as the loops take it, which check no strides: as bfloat16 if it is, else as float32."""
    if dtype is None:
        dtype = _BFLOAT16 if x.dtype == _BFLOAT16 else _FLOAT32
    if x.dtype != dtype:
        x = x.astype(dtype)
    return x if x.flags.c_contiguous else x.copy()


def _taken(x: np.ndarray, dtype: Any) -> np.ndarray:
    """``x`` contiguous; as float32 unless it has this dtype, or truth values."""
    return contiguous(x, x.dtype if x.dtype in (dtype, np.bool_) else _FLOAT32)


def _spread(x: np.ndarray, shape: tuple[int, ...], dtype: Any = _FLOAT32) -> np.ndarray:
    """Contiguous ``x``, broadcast to this shape; ValueError if it cannot be. The loops check no bounds."""
    if x.shape == shape and x.dtype == dtype and x.flags.c_contiguous:
        return x
    return contiguous(x if x.shape == shape else np.broadcast_to(x, shape), dtype)


def _indices(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.ascontiguousarray(x if x.shape == shape else np.broadcast_to(x, shape), np.int64)


def _of_columns(x: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """``x`` broadcast to [... 1 s], for scores[... t s]."""
    return _spread(x, (*scores.shape[:-2], 1, scores.shape[-1]))


def _sums_over_rows(loop, count: int, dy: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """[count d]: ``count`` sums over rows; the loop adds those of some rows at a time."""
    rows, normal_rows = [x.reshape(-1, dy.shape[-1]) for x in (contiguous(dy), _spread(normal, dy.shape, dy.dtype))]
    sums = np.zeros_like(dy, np.float32, shape=(count, dy.shape[-1]))
    for start in range(0, len(rows), _SUMMED):
        part, part_sums = slice(start, start + _SUMMED), np.zeros_like(sums) if start else sums
        loop(rows[part], normal_rows[part], *part_sums)
        if start:
            sums += part_sums
    return sums


def _in_place(loop, x: np.ndarray, *others: np.ndarray) -> None:
    """Run a loop that changes ``x`` in place, even if ``x`` is not contiguous."""
    changed = contiguous(x)
    loop(changed, *others)
    if changed is not x:
        x[...] = changed


def _inplace(x: np.ndarray) -> np.ndarray:
    """``x``; raises ValueError if it is not contiguous, and so cannot be updated in place."""
    if not x.flags.c_contiguous:
        raise ValueError(f"an array of shape {x.shape} that is not contiguous cannot be updated in place")
    return x


def _state(x: np.ndarray, p: np.ndarray) -> np.ndarray:
    if x.shape != p.shape:
        raise ValueError(f"optimizer state of shape {x.shape} for a parameter of shape {p.shape}")
    return _inplace(x)
