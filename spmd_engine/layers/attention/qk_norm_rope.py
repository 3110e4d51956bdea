"""Queries and keys before their product: norms and rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import prod, sqrt
from typing import Any

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.normalization import rms_norm, rms_norm_backward, rms_norm_backward_scale
from spmd_engine.arrays.precision import rounded, scaled, widened
from spmd_engine.arrays.rotary import Rope, Rotation, rotate, rotation_at
from spmd_engine.errors import UsageError
from spmd_engine.layers.attention.attention_config import AttentionConfig, RotaryOptions
from spmd_engine.layers.declarations import Parameter
from spmd_engine.sharding.shards import Shards


class Rotary:
    """Rotary positions for heads of a width; one object without state serves all layers of a model."""

    def __init__(self, width: int, options: RotaryOptions) -> None:
        rotated = int(width * options.part)
        if rotated % 2:
            raise UsageError(f"rotary: {rotated} numbers of a head of {width} are not pairs; rotate an even number")
        self.options, self.frequencies = options, options.frequencies(rotated // 2)

    def rotation(self, positions: Array, like: Array) -> Rotation:
        """The rotation of all pairs at positions[s] or [b s], on the device of ``like`` and in its dtype."""
        cosines, sines = rotation_at(positions, backend_of(like).constant(self.frequencies), like)
        magnitude = self.options.magnitude
        return (cosines, sines) if magnitude == 1 else (cosines * magnitude, sines * magnitude)


@cache
def rotary_with(width: int, options: RotaryOptions) -> Rotary:
    """The ``Rotary`` of a width and options: one object for all layers, which then share their rotations."""
    return Rotary(width, options)


# --- Queries and keys before their product: normalised, then rotated by their positions


class QKNormRope:
    """q[b s h k] = rotate(norm(q) · query_norm), and the same for k; both steps are optional

    Queries are then multiplied by ``factor``, the scale of the scores besides 1 / sqrt(k).

    ``heads`` are the letters of the heads of queries and of keys, ``sizes`` the sizes of these and of k. A norm is that
    of one head, with query_norm[k], or, with ``qk_norm_all_heads``, of all heads of a token, with query_norm[h k]. If
    heads are sharded, a rank's heads give only a part of the gradient of a scale that all heads share: it is summed
    over them, too. The gradients of keys and of their norm are unreduced over r, the queries that share them. With
    ``rope_before_norm`` the order is norm(rotate(q)).
    """

    def __init__(self, heads: Mapping[str, str], sizes: Mapping[str, int], config: AttentionConfig) -> None:
        self.rotary = None if config.rotary is None else rotary_with(sizes["k"], config.rotary)
        self.neighbours = config.rotary is not None and config.rotary.pairs == "neighbours"
        self.rope_before_norm = config.rope_before_norm
        self.factor = 1.0 if config.attention_scale is None else config.attention_scale * sqrt(sizes["k"])
        self.parameters: dict[str, Parameter] = {}
        self.norms: dict[str, NormOfHead | NormOfAllHeads | None] = {"query": None, "key": None}
        if not config.qk_norm:
            return
        for name in self.norms:
            h_dims, dims, summed = heads[name], "k", "bs" + heads["query"]
            self.norms[name] = NormOfHead(config.epsilon)
            if config.qk_norm_all_heads:
                dims, summed = " ".join(h_dims + "k"), "bs" + heads["query"].removeprefix(h_dims)
                count = prod(sizes[letter] for letter in h_dims + "k")
                self.norms[name] = NormOfAllHeads(config.epsilon, h_dims, count)
            self.parameters[f"{name}_norm"] = Parameter(dims, mean=1.0, decay=False, summed=summed)

    def forward(
        self, sh: Shards, p: Any, q: Array, k: Array, positions: Array, rotations: dict[Rotary, Rotation] | None = None
    ) -> tuple[Array, Array, Any, Rope | None]:
        """q and k, normalised and rotated, what the backward needs, and a rotation that is left to the caller.

        ``positions`` are [s], or [b s]. ``rotations`` has those of these positions that other layers have computed; a
        missing one is added. With ``rotations``, that is, with a cache, one that comes last is left to the caller.
        """
        rotation = None if self.rotary is None or rotations is None else rotations.get(self.rotary)
        if self.rotary is not None and rotation is None:
            rotation = self.rotary.rotation(positions, q)
            if rotations is not None:
                rotations[self.rotary] = rotation
        before, after = (rotation, None) if self.rope_before_norm else (None, rotation)
        left = (after, self.neighbours) if after and rotations is not None and self.factor == 1 else None
        normals: dict[str, Any] = {}
        results = []
        for x, (name, norm) in zip((q, k), self.norms.items(), strict=True):
            if before is not None:
                x = rotate(x, before, self.neighbours)
            if norm is not None:
                x, normals[name] = norm.forward(sh, x, p[f"{name}_norm"])
            results.append(x if after is None or left else rotate(x, after, self.neighbours))
        q, k = results
        return (q if self.factor == 1 else scaled(q, self.factor)), k, (before, after, normals), left

    def backward(self, sh: Shards, p: Any, saved: Any, gradients: dict[str, Array]) -> dict[str, Array]:
        """Replace ``gradients`` of the results by those of q and k; returns the gradients of the norms' scales."""
        before, after, normals = saved
        scale_gradients = {}
        if self.factor != 1:
            gradients["query"] = scaled(gradients["query"], self.factor)
        for name, norm in self.norms.items():
            dx = gradients[name]
            if after is not None:
                dx = rotate(dx, after, self.neighbours, back=True)
            if norm is not None:
                scale = f"{name}_norm"
                dx, scale_gradients[scale] = norm.backward(sh, normals[name], p[scale], dx)
            gradients[name] = dx if before is None else rotate(dx, before, self.neighbours, back=True)
        return scale_gradients


# --- Norms of queries or keys: of each head by itself, or of all heads of a token


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
    """y[b s h k] = x / sqrt(mean(x²) + epsilon) · scale[h k], the mean over h and k, ``count`` numbers

    ``heads`` are the letters h of the heads, which may be sharded:

        1. squares[b s] {U_h} = sum of x² over this rank's heads,    squares[b s] = AllReduce_h(...)
        2. n = x / sqrt(squares / count + epsilon),                   y = n · scale
    Backward, linear in dy, which may be unreduced over other letters than h:
        3. g = dy · scale,   along[b s] = AllReduce_h(sum of g · n over this rank's heads)
        4. dx = (g - n · along / count) / sqrt(...),                  dscale = sum of dy · n over b and s
    """

    def __init__(self, epsilon: float, heads: str, count: int) -> None:
        self.epsilon, self.heads, self.count = epsilon, heads, count

    def forward(self, sh: Shards, x: Array, scale: Array) -> tuple[Array, Any]:
        """y, and what the backward needs."""
        xp, dtype, x = backend_of(x).xp, x.dtype, widened(x)
        squares = sh.all_reduce(_sum_over_heads(x * x), over=self.heads)
        inverse = _expand_to_heads(1.0 / xp.sqrt(squares / self.count + self.epsilon), x)
        normal = x * inverse
        return rounded(normal * scale, dtype), (rounded(normal, dtype), inverse)

    def backward(self, sh: Shards, saved: Any, scale: Array, dy: Array) -> tuple[Array, Array]:
        """dx and dscale."""
        normal, inverse = saved
        xp, dtype = backend_of(dy).xp, dy.dtype
        dy, normal, scale = widened(dy), widened(normal), widened(scale)
        weighted = dy * normal
        dscale = weighted.sum(axis=(0, 1))
        weighted *= scale
        along = sh.all_reduce(_sum_over_heads(weighted), over=self.heads)
        dx = dy * scale
        dx -= normal * _expand_to_heads(along / self.count, dy)
        dx *= inverse
        return rounded(xp.ascontiguousarray(dx), dtype), dscale


def _sum_over_heads(x: Array) -> Array:
    """The sums [b s] of x[b s h k], or [b s h r k]."""
    return x.sum(axis=tuple(range(2, x.ndim)))


def _expand_to_heads(x: Array, like: Array) -> Array:
    """x[b s] as [b s 1 1], or [b s 1 1 1], to be multiplied with ``like``."""
    return x.reshape(*x.shape, *[1] * (like.ndim - 2))
