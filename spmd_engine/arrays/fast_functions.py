"""The functions marked ``@fused`` as calls of compiled loops, for float32 arrays on the host."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.arrays.factors import adamw_factors
from spmd_engine.arrays.mask import hide

_SUMMED = 1024  # rows whose sum is made one by one: a sum of a million would have lost two digits more

logger = logging.getLogger(__name__)


def fast_functions() -> FastFunctions | None:
    """The compiled functions, where Numba is installed and SPMD_FAST is not 0; else None, and NumPy does it."""
    return compiled_functions(FastFunctions, "fast_kernels", "fast_decoders")


def loops_are_there() -> bool:
    """Whether ``fast_functions`` will find them, without loading them."""
    return os.environ.get("SPMD_FAST", "1") != "0" and find_spec("numba") is not None


def compiled_functions(kind: type, *modules: str) -> Any:
    """``kind(*modules)`` with all its loops compiled; None without Numba, and with SPMD_FAST=0."""
    if os.environ.get("SPMD_FAST", "1") == "0":
        return None
    try:
        from spmd_engine.arrays import fast_cache

        loops = [import_module(f"spmd_engine.arrays.{name}") for name in modules]
        from spmd_engine.arrays.fast_kernels import relu
    except ModuleNotFoundError:
        return None
    except (ImportError, SystemError) as error:  # its releases follow NumPy's with a delay
        logger.warning("Numba is installed, but cannot be used (%s): NumPy computes instead", error)
        return None
    functions, folder = kind(*loops), relu.stats.cache_path
    if folder is None:  # nothing is kept: this process is the only one to compile for
        functions.call_all()
    else:
        fast_cache.prepare(functions.call_all, Path(folder))
    return functions


class FastFunctions:
    """Each has the name, signature and result of its NumPy text, where both are documented."""

    def __init__(self, loops, of_decoders) -> None:
        self._loops, self._decoders = loops, of_decoders

    def takes(self, x: np.ndarray) -> bool:
        """Float32 is what one trains in when speed counts; what is computed in float64 is computed by NumPy."""
        return x.dtype == np.float32

    def call_all(self) -> None:
        """Call everything once, so that it is loaded or compiled."""
        z, targets = np.zeros((2, 3), np.float32), np.zeros(2, np.int64)
        row, rows = np.ones(3, np.float32), np.ones(2, np.float32)
        for want_slope in (True, False):
            self.relu(z, want_slope)
            self.gelu(z, want_slope)
            self.silu_gate(z, z, want_slope)
        self.layer_norm(z, row, row, 1.0)
        self.layer_norm_backward(z, z, rows, row)
        self.layer_norm_backward_parameters(z, z)
        self.rms_norm(z, row, 1.0)
        self.rms_norm_backward(z, z, rows, row)
        self.rms_norm_backward_scale(z, z)
        for neighbours in (True, False):
            self.rotate(z[None], (z[:, :1], z[:, :1]), neighbours)
        self.adamw(*np.ones((4, 1), np.float32), step=1, rate=1.0, betas=(0.5, 0.5), epsilon=1.0, decay=0.0)
        for velocity in (None, z):
            self.momentum_sgd(z.copy(), z, velocity, rate=1.0, momentum=0.5, decay=0.0)
        self.exponentiate(z.copy(), rows[:, None])
        block = z[None].copy()
        self.exponentiate(block, row[None, None])
        self.softmax_backward(block, block.copy(), row[None, None])
        self.scores_of_targets(z, targets, rows)
        self.cross_entropy_gradient(z.copy(), rows, rows, targets)

    # Activations

    def relu(self, z, want_slope=True):
        flat = _contiguous(z).reshape(-1)
        y = np.empty_like(flat)
        if not want_slope:
            self._loops.relu_value(flat, y)
            return y.reshape(z.shape), None
        slope = np.empty_like(flat, np.bool_)
        self._loops.relu(flat, y, slope)
        return y.reshape(z.shape), slope.reshape(z.shape)

    def gelu(self, z, want_slope=True):
        flat = _contiguous(z).reshape(-1)
        y = np.empty_like(flat)
        if not want_slope:
            self._loops.gelu_value(flat, y)
            return y.reshape(z.shape), None
        slope = np.empty_like(flat)
        self._loops.gelu(flat, y, slope)
        return y.reshape(z.shape), slope.reshape(z.shape)

    def silu_gate(self, z, u, want_slopes=True):
        gates, values = _contiguous(z).reshape(-1), _spread(u, z.shape).reshape(-1)
        h = np.empty_like(gates)
        if not want_slopes:
            self._decoders.silu_gate_value(gates, values, h)
            return h.reshape(z.shape), None
        slopes = np.empty_like(gates), np.empty_like(gates)
        self._decoders.silu_gate(gates, values, h, *slopes)
        return h.reshape(z.shape), (slopes[0].reshape(z.shape), slopes[1].reshape(z.shape))

    # Rotary positions

    def rotate(self, x, turn, neighbours, *, back=False):
        cosine, sine = turn
        rows, pairs = x.shape[:2], cosine.shape[-1]
        cosine = _spread(cosine, (*rows, pairs)).reshape(-1, pairs)
        sine = _spread(-sine if back else sine, (*rows, pairs)).reshape(-1, pairs)
        flat = _contiguous(x).reshape(len(cosine), prod(x.shape[2:-1]), x.shape[-1])
        y = np.empty_like(flat)
        loop = self._decoders.rotate_neighbours if neighbours else self._decoders.rotate_halves
        loop(flat, cosine, sine, y)
        return y.reshape(x.shape)

    # Norms

    def layer_norm(self, x, scale, shift, epsilon):
        rows = _rows(x)
        y, normal, inverse = np.empty_like(rows), np.empty_like(rows), np.empty_like(rows, shape=len(rows))
        scale, shift = _spread(scale, x.shape[-1:]), _spread(shift, x.shape[-1:])
        self._loops.layer_norm(rows, scale, shift, np.float32(epsilon), y, normal, inverse)
        return y.reshape(x.shape), normal.reshape(x.shape), inverse.reshape(x.shape[:-1])

    def layer_norm_backward(self, dy, normal, inverse, scale):
        return _norm_backward(self._loops.layer_norm_backward, dy, normal, inverse, scale)

    def layer_norm_backward_parameters(self, dy, normal):
        sums = _sums_over_rows(self._loops.layer_norm_backward_parameters, 2, dy, normal)
        return sums[0], sums[1]

    def rms_norm(self, x, scale, epsilon):
        rows = _rows(x)
        y, normal, inverse = np.empty_like(rows), np.empty_like(rows), np.empty_like(rows, shape=len(rows))
        self._decoders.rms_norm(rows, _spread(scale, x.shape[-1:]), np.float32(epsilon), y, normal, inverse)
        return y.reshape(x.shape), normal.reshape(x.shape), inverse.reshape(x.shape[:-1])

    def rms_norm_backward(self, dy, normal, inverse, scale):
        return _norm_backward(self._decoders.rms_norm_backward, dy, normal, inverse, scale)

    def rms_norm_backward_scale(self, dy, normal):
        return _sums_over_rows(self._decoders.rms_norm_backward_scale, 1, dy, normal)[0]

    # Optimizers

    def adamw(self, p, g, mean, square, *, step, rate, betas, epsilon, decay, scale=1.0):
        factors = adamw_factors(step=step, rate=rate, betas=betas, epsilon=epsilon, decay=decay, scale=scale)
        mean, square = _state(mean, p), _state(square, p)
        self._loops.adamw(_flat(p), _gradient(g, p), mean, square, *map(np.float32, factors))

    def momentum_sgd(self, p, g, velocity, *, rate, momentum, decay, scale=1.0):
        kept = np.float32(1.0 - rate * decay)
        if velocity is None:
            self._loops.sgd(_flat(p), _gradient(g, p), np.float32(scale * rate), kept)
        else:
            numbers = map(np.float32, (scale, momentum, rate))
            self._loops.momentum_sgd(_flat(p), _gradient(g, p), _state(velocity, p), *numbers, kept)

    # Softmax

    def exponentiate(self, scores, shift, mask=None):
        hide(scores, mask)
        if scores.ndim == 2:
            self._loops.exponentiate_rows(scores, _spread(shift, (len(scores), 1))[:, 0])
        else:
            self._loops.exponentiate_columns(scores, _of_columns(shift, scores))

    def softmax_backward(self, ds, p, projection):
        self._loops.softmax_backward(ds, _spread(p, ds.shape), _of_columns(projection, ds))

    def scores_of_targets(self, scores, targets, top):
        found = np.empty_like(scores, shape=len(targets))
        rows = scores.shape[:1]
        self._loops.scores_of_targets(scores, _spread(targets, rows), _spread(top, rows), found)
        return found

    def cross_entropy_gradient(self, p, sums, weights, targets):
        rows = p.shape[:1]
        self._loops.cross_entropy_gradient(p, _spread(sums, rows), _spread(weights, rows), _spread(targets, rows))


def _spread(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Contiguous ``x`` of this shape, as NumPy broadcasts; ValueError if it cannot. The loops look at no bounds."""
    return _contiguous(x if x.shape == shape else np.broadcast_to(x, shape))


def _of_columns(x: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """x[h 1 s] of scores[h t s], as [h s]."""
    return _spread(x, (len(scores), 1, scores.shape[2]))[:, 0]


def _norm_backward(loop, dy: np.ndarray, normal: np.ndarray, inverse: np.ndarray, scale: np.ndarray) -> np.ndarray:
    rows = _rows(dy)
    dx = np.empty_like(rows)
    normal, inverse = _rows(_spread(normal, dy.shape)), _spread(inverse, dy.shape[:-1]).reshape(-1)
    loop(rows, normal, inverse, _spread(scale, dy.shape[-1:]), dx)
    return dx.reshape(dy.shape)


def _sums_over_rows(loop, count: int, dy: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """[count d]: so many sums over rows, to which the loop adds those of some rows."""
    rows, normal_rows = _rows(dy), _rows(_spread(normal, dy.shape))
    sums = np.zeros_like(dy, shape=(count, dy.shape[-1]))
    for start in range(0, len(rows), _SUMMED):
        part, some = slice(start, start + _SUMMED), np.zeros_like(sums)
        loop(rows[part], normal_rows[part], *some)
        sums += some
    return sums


def _flat(x: np.ndarray) -> np.ndarray:
    """``x`` with one dimension, in its own memory, to be written to."""
    if x.ndim > 1 and not x.flags.c_contiguous:
        raise ValueError(f"an array of shape {x.shape} that is not contiguous cannot be updated in place")
    return x.reshape(-1)


def _state(x: np.ndarray, p: np.ndarray) -> np.ndarray:
    if x.shape != p.shape:
        raise ValueError(f"optimizer state of shape {x.shape} for a parameter of shape {p.shape}")
    return _flat(x)


def _gradient(g: np.ndarray, p: np.ndarray) -> np.ndarray:
    """As p[n] is, whatever it came as: the loops know none of the short floats."""
    return _spread(g, p.shape).astype(p.dtype, copy=False).reshape(-1)


def _contiguous(x: np.ndarray) -> np.ndarray:
    return x if x.flags.c_contiguous else x.copy()


def _rows(x: np.ndarray) -> np.ndarray:
    return _contiguous(x).reshape(-1, x.shape[-1])
