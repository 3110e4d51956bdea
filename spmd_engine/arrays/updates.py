"""Optimizer updates, fused over flat arrays in cache-sized pieces."""

from collections.abc import Iterable
from math import inf

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.factors import adamw_factors
from spmd_engine.arrays.fused import chunks, fused, kernels_for

_SMALL = 1e-25  # sums of squares in float32 below this have lost terms


@fused
def adamw(p, g, mean, square, *, step, rate, betas, epsilon, decay, scale=1.0) -> None:
    """One AdamW step on flat p[n], g[n] and state mean[n], square[n], in place; ``step`` counts from 1.

    Loshchilov and Hutter, "Decoupled weight decay regularization" (2019). The gradient is multiplied by
    ``scale`` (clipping); ``decay`` is decoupled: p shrinks by rate * decay first.
    """
    xp = backend_of(p).xp
    factors = adamw_factors(step=step, rate=rate, betas=betas, epsilon=epsilon, decay=decay, scale=scale)
    fresh, beta1, weight, beta2, epsilon, size, kept = factors
    for part in chunks(p):
        p_part, m, v = p[part], mean[part], square[part]
        work = g[part] * fresh
        m *= beta1
        m += work
        work *= work
        work *= weight
        v *= beta2
        v += work
        xp.sqrt(v, out=work)
        work += epsilon
        xp.divide(m, work, out=work)
        work *= size
        if decay:
            p_part *= kept
        p_part -= work


@fused
def momentum_sgd(p, g, velocity, *, rate, momentum, decay, scale=1.0) -> None:
    """One step of SGD with momentum (Sutskever et al., 2013, as PyTorch writes it) and decoupled decay."""
    for part in chunks(p):
        p_part = p[part]
        if velocity is not None:
            velocity[part] *= momentum
            velocity[part] += g[part] * scale
            grad = velocity[part] * rate
        else:
            grad = g[part] * (scale * rate)
        if decay:
            p_part *= 1.0 - rate * decay
        p_part -= grad


def total_of_squares(arrays: Iterable[Array]) -> float:
    """The sum of squares of flat arrays, in float64. The host waits for a device once."""
    total, on_device = 0.0, []
    for x in arrays:
        kernels = kernels_for(x) if backend_of(x).on_device else None
        if kernels is not None:
            on_device.append(kernels.sum_of_squares(x))
        else:
            total += sum_of_squares(x)
    if on_device:
        backend = backend_of(on_device[0])
        total += float(backend.to_host(backend.xp.stack(on_device).sum()))
    return total


def sum_of_squares(x: Array) -> float:
    """The sum of squares of flat x[n], accumulated in float64 across pieces."""
    backend, total = backend_of(x), 0.0
    with backend.errstate(over="ignore"):  # float32 may overflow; it is computed again
        for part in chunks(x):
            piece = x[part]
            squares = float(backend.xp.dot(piece, piece)) if piece.itemsize >= 4 else 0.0
            if not _SMALL < squares < inf:  # squares of large float32 numbers are not finite, of small ones are 0
                wide = piece.astype(backend.xp.float64)
                squares = float(backend.xp.dot(wide, wide))
            total += squares
    return total
