"""The functions marked ``@fused`` as calls of compiled loops, for float32 arrays on the host."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from math import prod
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from spmd_engine.arrays.factors import adamw_factors, hide

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
        from spmd_engine.arrays.numba.object_code import linked

        return linked(module)
    except (ImportError, SystemError, RuntimeError) as error:  # Numba's releases follow NumPy's with a delay
        logger.warning("Numba is installed, but cannot be used (%s): NumPy computes instead", error)
        return None


class FastFunctions:
    """Each function has the name, signature and result of its NumPy version, which is documented."""

    def __init__(self, loops) -> None:
        self._loops = loops

    def takes(self, x: np.ndarray) -> bool:
        """Only float32, the dtype of fast training; NumPy computes float64."""
        return x.dtype == np.float32

    def round_to_bfloat16(self, x, out=None):
        """``x`` as bfloat16, in contiguous ``out`` if given."""
        x = _contiguous(x)
        y = np.empty_like(x, bfloat16) if out is None else out
        self._loops.round_to_bfloat16(x.view(np.int32), y.view(np.int16))
        return y

    def add_halves(self, x, y):
        """x[... d] += y, of bfloat16, shaped as x or [d]; False if the loop does not take these arrays."""
        return self._of_halves(self._loops.add_halves, x, y)

    def multiply_halves(self, x, y):
        """x[... d] *= y; see ``add_halves``."""
        return self._of_halves(self._loops.multiply_halves, x, y)

    def _of_halves(self, loop, x, y):
        alike = x.dtype == y.dtype == bfloat16 and x.flags.c_contiguous and x.ndim
        if not alike or y.shape not in (x.shape, x.shape[-1:]):
            return False
        if x.size:
            rows = (z.view(np.int16).reshape(-1, x.shape[-1]) for z in (x, np.ascontiguousarray(y)))
            loop(*rows)
        return True

    # Activations

    def relu(self, z, want_slope=True):
        return self._activation("relu", z, np.bool_ if want_slope else None)

    def gelu(self, z, want_slope=True):
        return self._activation("gelu", z, np.float32 if want_slope else None)

    def _activation(self, name, z, slope_dtype):
        z = _contiguous(z)
        y = np.empty_like(z)
        if slope_dtype is None:
            getattr(self._loops, f"{name}_value")(z, y)
            return y, None
        slope = np.empty_like(z, slope_dtype)
        getattr(self._loops, name)(z, y, slope)
        return y, slope

    def silu_gate(self, z, u, want_slopes=True):
        z, u = _contiguous(z), _spread(u, z.shape)
        h = np.empty_like(z)
        if not want_slopes:
            self._loops.silu_gate_value(z, u, h)
            return h, None
        slopes = np.empty_like(z), np.empty_like(z)
        self._loops.silu_gate(z, u, h, *slopes)
        return h, slopes

    # Rotary positions

    def rotate(self, x, turn, neighbours, *, back=False):
        cosine, sine = turn
        rows, pairs = x.shape[:2], cosine.shape[-1]
        cosine = _spread(cosine, (*rows, pairs))
        sine = _spread(-sine if back else sine, (*rows, pairs))
        flat = _contiguous(x).reshape(prod(rows), prod(x.shape[2:-1]), x.shape[-1])
        y = np.empty_like(flat)
        loop = self._loops.rotate_neighbours if neighbours else self._loops.rotate_halves
        loop(flat, cosine, sine, y)
        return y.reshape(x.shape)

    # Norms

    def layer_norm(self, x, scale, shift, epsilon):
        return _norm(self._loops.layer_norm, x, epsilon, scale, shift)

    def layer_norm_backward(self, dy, normal, inverse, scale):
        return _norm_backward(self._loops.layer_norm_backward, dy, normal, inverse, scale)

    def layer_norm_backward_parameters(self, dy, normal):
        sums = _sums_over_rows(self._loops.layer_norm_backward_parameters, 2, dy, normal)
        return sums[0], sums[1]

    def rms_norm(self, x, scale, epsilon):
        return _norm(self._loops.rms_norm, x, epsilon, scale)

    def rms_norm_backward(self, dy, normal, inverse, scale):
        return _norm_backward(self._loops.rms_norm_backward, dy, normal, inverse, scale)

    def rms_norm_backward_scale(self, dy, normal):
        return _sums_over_rows(self._loops.rms_norm_backward_scale, 1, dy, normal)[0]

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

    def exponentiate(self, scores, shift, mask=None):
        hide(scores, mask)
        if scores.ndim == 2:
            _in_place(self._loops.exponentiate_rows, scores, _spread(shift, (len(scores), 1)))
        else:
            _in_place(self._loops.exponentiate_columns, scores, _of_columns(shift, scores))

    def softmax_backward(self, ds, p, projection):
        _in_place(self._loops.softmax_backward, ds, _spread(p, ds.shape), _of_columns(projection, ds))

    def scores_of_targets(self, scores, targets, top):
        result = np.empty_like(scores, shape=len(targets))
        rows = scores.shape[:1]
        self._loops.scores_of_targets(_contiguous(scores), _indices(targets, rows), _spread(top, rows), result)
        return result

    def cross_entropy_gradient(self, p, sums, weights, targets):
        rows = p.shape[:1]
        others = _spread(sums, rows), _spread(weights, rows), _indices(targets, rows)
        _in_place(self._loops.cross_entropy_gradient, p, *others)


def _contiguous(x: np.ndarray) -> np.ndarray:
    """``x`` as contiguous float32, which the loops take: they check no strides."""
    if x.dtype != np.float32:
        x = x.astype(np.float32)
    return x if x.flags.c_contiguous else x.copy()


def _spread(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Contiguous ``x``, broadcast to this shape; ValueError if it cannot be. The loops check no bounds."""
    return _contiguous(x if x.shape == shape else np.broadcast_to(x, shape))


def _indices(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.ascontiguousarray(x if x.shape == shape else np.broadcast_to(x, shape), np.int64)


def _of_columns(x: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """``x`` broadcast to [h 1 s], for scores[h t s]."""
    return _spread(x, (len(scores), 1, scores.shape[2]))


def _norm(loop, x: np.ndarray, epsilon: float, *parameters: np.ndarray) -> tuple[np.ndarray, ...]:
    x = _contiguous(x)
    results = np.empty_like(x), np.empty_like(x), np.empty_like(x, shape=x.shape[:-1])
    loop(x, *(_spread(parameter, x.shape[-1:]) for parameter in parameters), epsilon, *results)
    return results


def _norm_backward(loop, dy: np.ndarray, normal: np.ndarray, inverse: np.ndarray, scale: np.ndarray) -> np.ndarray:
    dy = _contiguous(dy)
    dx = np.empty_like(dy)
    loop(dy, _spread(normal, dy.shape), _spread(inverse, dy.shape[:-1]), _spread(scale, dy.shape[-1:]), dx)
    return dx


def _sums_over_rows(loop, count: int, dy: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """[count d]: ``count`` sums over rows; the loop adds those of some rows at a time."""
    rows, normal_rows = (x.reshape(-1, dy.shape[-1]) for x in (_contiguous(dy), _spread(normal, dy.shape)))
    sums = np.zeros_like(dy, shape=(count, dy.shape[-1]))
    for start in range(0, len(rows), _SUMMED):
        part, part_sums = slice(start, start + _SUMMED), np.zeros_like(sums)
        loop(rows[part], normal_rows[part], *part_sums)
        sums += part_sums
    return sums


def _in_place(loop, x: np.ndarray, *others: np.ndarray) -> None:
    """Run a loop that changes ``x`` in place, even if ``x`` is not contiguous."""
    changed = _contiguous(x)
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
