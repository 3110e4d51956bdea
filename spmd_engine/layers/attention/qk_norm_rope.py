"""What is done to queries and keys before they meet: normalised, then turned by their positions."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.normalization import rms_norm, rms_norm_backward, rms_norm_backward_scale
from spmd_engine.arrays.rotary import Turn, rotate
from spmd_engine.layers.attention.rotary import Rotary
from spmd_engine.layers.declarations import Parameter
from spmd_engine.sharding.shards import Shards


class QueriesAndKeys:
    """q[b s h k], k[b s h k] = rotate(norm(q) · query_norm), the same for k; each of the two steps or none

    Queries are then multiplied by the ``factor``, if one is given: what else divides scores but the root of k.

    ``heads`` are the letters of the heads of queries and of keys, ``sizes`` theirs and that of k. Norms are of each
    head, with query_norm[k], or, ``together``, of all heads of a token, with query_norm[h k]. A scale that all heads
    share gets only a part of its gradient from a rank's heads, if any of them are cut: it is summed over them, too.
    Keys' gradients are unreduced over r, queries that share them, and so is that of their norm. With ``turned_first``
    it is norm(rotate(q)).
    """

    def __init__(
        self,
        heads: Mapping[str, str],
        sizes: Mapping[str, int],
        rotary: Rotary | None = None,
        norm_epsilon: float | None = None,
        together: bool = False,
        factor: float = 1.0,
        turned_first: bool = False,
    ) -> None:
        self.rotary, self.factor, self.turned_first = rotary, factor, turned_first
        self.parameters: dict[str, Parameter] = {}
        self.norms: dict[str, NormOfHead | NormOfAllHeads | None] = {"query": None, "key": None}
        if norm_epsilon is None:
            return
        for name in self.norms:
            own, dims, summed = heads[name], "k", "bs" + heads["query"]
            self.norms[name] = NormOfHead(norm_epsilon)
            if together:
                dims, summed = " ".join(own + "k"), "bs" + heads["query"].removeprefix(own)
                self.norms[name] = NormOfAllHeads(norm_epsilon, own, prod(sizes[letter] for letter in own + "k"))
            self.parameters[f"{name}_norm"] = Parameter(dims, mean=1.0, decay=False, summed=summed)

    def forward(
        self, sh: Shards, p: Any, q: Array, k: Array, positions: Array, turns: dict[Rotary, Turn] | None = None
    ) -> tuple[Array, Array, Any]:
        """q and k, ready to meet, and what the backward needs; ``positions`` are [s], or [b s].

        ``turns`` are those of these positions that other layers have made already, and are added to.
        """
        turn = None if self.rotary is None or turns is None else turns.get(self.rotary)
        if self.rotary is not None and turn is None:
            turn = self.rotary.turn(positions, q)
            if turns is not None:
                turns[self.rotary] = turn
        ready, normals = [], {}
        for (name, norm), x in zip(self.norms.items(), (q, k), strict=True):
            if turn is not None and self.turned_first:
                x = rotate(x, turn, self.rotary.neighbours)
            if norm is not None:
                x, normals[name] = norm.forward(sh, x, p[f"{name}_norm"])
            if turn is not None and not self.turned_first:
                x = rotate(x, turn, self.rotary.neighbours)
            ready.append(x)
        if self.factor != 1:
            ready[0] = ready[0] * self.factor
        return *ready, (turn, normals)

    def backward(self, sh: Shards, p: Any, saved: Any, gradients: dict[str, Array]) -> dict[str, Array]:
        """Make ``gradients`` of what met those of q and k as they were; returns the gradients of the norms' scales."""
        turn, normals = saved
        of_scales = {}
        if self.factor != 1:
            gradients["query"] = gradients["query"] * self.factor
        for name, norm in self.norms.items():
            if turn is not None and not self.turned_first:
                gradients[name] = rotate(gradients[name], turn, self.rotary.neighbours, back=True)
            if norm is not None:
                scale = f"{name}_norm"
                gradients[name], of_scales[scale] = norm.backward(sh, normals[name], p[scale], gradients[name])
            if turn is not None and self.turned_first:
                gradients[name] = rotate(gradients[name], turn, self.rotary.neighbours, back=True)
        return of_scales


# --- Norms of queries or keys: of each head by itself, or of all heads of a token together


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
