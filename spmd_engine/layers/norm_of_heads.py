"""Norms of queries or keys: of each head by itself, or of all heads of a token together."""

from __future__ import annotations

from typing import Any

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.normalization import rms_norm, rms_norm_backward, rms_norm_backward_scale
from spmd_engine.sharding.shards import Shards


class NormOfHead:
    """y[b s h k] = x / sqrt(mean(x²) + epsilon) · scale[k], the mean over k"""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def forward(self, sh: Shards, x: Array, scale: Array) -> tuple[Array, Any]:
        """y, and what the backward needs."""
        y, *saved = rms_norm(x, scale, self.epsilon)
        return y, saved

    def backward(self, sh: Shards, saved: Any, scale: Array, dy: Array) -> tuple[Array, Array]:
        """dx and dscale."""
        normal, inverse = saved
        return rms_norm_backward(dy, normal, inverse, scale), rms_norm_backward_scale(dy, normal)


class NormOfAllHeads:
    """y[b s h k] = x / sqrt(mean(x²) + epsilon) · scale[h k], the mean over h and k, which are so ``many`` numbers

    ``heads`` are the letters h of the heads, which may be cut:

        1. squares[b s] {U_h} = sum of x² over this rank's heads,    squares[b s] = AllReduce_h(...)
        2. n = x / sqrt(squares / many + epsilon),                   y = n · scale
    Backward, linear in dy, which may be unreduced over other letters than h:
        3. g = dy · scale,   along[b s] = AllReduce_h(sum of g · n over this rank's heads)
        4. dx = (g - n · along / many) / sqrt(...),                  dscale = sum of dy · n over b and s
    """

    def __init__(self, epsilon: float, heads: str, many: int) -> None:
        self.epsilon, self.heads, self.many = epsilon, heads, many

    def forward(self, sh: Shards, x: Array, scale: Array) -> tuple[Array, Any]:
        """y, and what the backward needs."""
        xp = backend_of(x).xp
        squares = sh.all_reduce(_over_heads(x * x), over=self.heads)
        inverse = _of_token(1.0 / xp.sqrt(squares / self.many + self.epsilon), x)
        normal = x * inverse
        return normal * scale, (normal, inverse)

    def backward(self, sh: Shards, saved: Any, scale: Array, dy: Array) -> tuple[Array, Array]:
        """dx and dscale."""
        normal, inverse = saved
        xp, weighted = backend_of(dy).xp, dy * normal
        dscale = weighted.sum(axis=(0, 1))
        weighted *= scale
        along = sh.all_reduce(_over_heads(weighted), over=self.heads)
        dx = dy * scale
        dx -= normal * _of_token(along / self.many, dy)
        dx *= inverse
        return xp.ascontiguousarray(dx), dscale


def _over_heads(x: Array) -> Array:
    """The sums [b s] of x[b s h k], or [b s h r k]."""
    return x.sum(axis=tuple(range(2, x.ndim)))


def _of_token(x: Array, like: Array) -> Array:
    """x[b s], to be multiplied with [b s h k], or [b s h r k]."""
    return x.reshape(*x.shape, *[1] * (like.ndim - 2))
