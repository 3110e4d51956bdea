"""Causal multi-head self-attention with sharded heads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import ceil, log2, prod, sqrt
from typing import Any

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.elementwise import add_to
from spmd_engine.arrays.precision import accumulated_in, rounded, widened
from spmd_engine.errors import UsageError
from spmd_engine.layers.attention.attention_config import AttentionConfig
from spmd_engine.layers.attention.context import ContextMethod, GatherKeys
from spmd_engine.layers.attention.kv_cache import cached_attention
from spmd_engine.layers.attention.qk_norm_rope import QKNormRope, Rotary
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.layer import Layer
from spmd_engine.sharding.shards import Shards

PROJECTIONS: tuple[str, ...] = ("query", "key", "value")


class Attention(Layer):
    """q, k, v[b s h k] = x[b s d] · w[d h k] + bias[h k]
    y[b s d] = softmax(mask(q · k / sqrt(k))) · v · output[h k d] + bias[d]

    With h sharded, the projections are column-parallel and the output is row-parallel, as in the MLP. If s is sharded
    on the residual stream, it is gathered first.

    With fewer ``key_value_heads`` than ``heads``, r queries share each key head (Ainslie et al., "GQA", 2023):
    queries are q[b s h r k], and their weights have r besides h. A layout may then shard r instead of h. All ranks of r
    compute the same keys and values, but each rank's queries give only a part of their gradients, which are therefore
    unreduced over r: in dx, as those of queries, and in the weights, as over b and s.

    ``config`` has all other options. Its fields are also keywords: ``Attention(64, 8, window=128)``. ``context`` is the
    method for an s that is sharded inside. Raises UsageError for numbers of heads that do not divide.
    """

    attends = True

    def __init__(
        self,
        width: int,
        heads: int,
        key_value_heads: int | None = None,
        config: AttentionConfig | None = None,
        *,
        context: ContextMethod | None = None,
        std: float = 0.02,
        out_std: float = 0.02,
        **fields: Any,
    ):
        config = _with_fields(config or AttentionConfig(), fields)
        shared = heads if key_value_heads is None else key_value_heads
        if shared < 1 or heads % shared or (config.head_width is None and width % heads):
            raise UsageError(
                f"attention: {heads} heads must divide the width {width}, and {shared} key heads the {heads}"
            )
        self.context, self.config = context or GatherKeys(), config
        self.sizes = {"d": width, "h": shared, "k": config.head_width or width // heads}
        if shared < heads:
            self.sizes["r"] = heads // shared
        self.across = "hr" if shared < heads else "h"
        self.may_cut = "bs" + self.across
        #: The letters of each projection's heads.
        self.heads: dict[str, str] = {"query": self.across, "key": "h", "value": "h"}
        self._patterns = {name: f"bsd,d{h}k->bs{h}k" for name, h in self.heads.items()}
        self._output_pattern = f"bs{self.across}k,{self.across}kd->bsd"
        self.alibi = Alibi(self.across, self.sizes, config.alibi) if config.alibi else None
        self.qk_norm_rope = QKNormRope(self.heads, self.sizes, config)
        weights, biases = {}, {}
        for name, heads_of in self.heads.items():
            summed = "bs" + self.across.removeprefix(heads_of)  # keys and values: r, too, the queries that share them
            weights[name] = Parameter(_dims("d", heads_of, "k"), std=std, summed=summed)
            biases[f"{name}_bias"] = Parameter(_dims(heads_of, "k"), decay=False, summed=summed)
        self.parameters = {
            **weights,
            **(biases if config.bias else {}),
            **self.qk_norm_rope.parameters,
            "output": Parameter(_dims(self.across, "k", "d"), std=out_std),
        }
        if config.output_bias:
            self.parameters["output_bias"] = Parameter("d", decay=False, where="residual")

    def cost(self, length):
        window = self.config.window
        visible = length if window is None else min(length, 2 * window)
        return super().cost(length) + self.sizes["d"] * visible  # half the keys on average, for scores and for values

    def forward(self, sh, p, x, ctx):
        x = sh.all_gather(x, "b s d", "s", across=self.across)
        of = self._patterns
        q, k, v = einsum(of["query"], x, p["query"]), einsum(of["key"], x, p["key"]), einsum(of["value"], x, p["value"])
        if self.config.bias:
            for name, projection in zip(PROJECTIONS, (q, k, v), strict=True):
                add_to(projection, p[f"{name}_bias"])
        rotations = None if ctx.cache is None else ctx.cache.rotations
        q, k, qk_saved, rope = self.qk_norm_rope.forward(sh, p, q, k, ctx.positions, rotations)
        if self.alibi is not None:
            q, k, v = self.alibi.widen(sh, q, k, v, ctx.positions)
        window, cap = self.config.window, self.config.attention_cap
        if ctx.cache is not None:
            mixed, attended = cached_attention(sh, ctx.cache, q, k, v, ctx.positions, window, cap, rope), None
        else:
            mixed, attended = self.context.forward(sh, q, k, v, ctx, window, cap)
        if self.alibi is not None:
            mixed = rounded(mixed[..., :-1], x.dtype)
        y = einsum(self._output_pattern, mixed, p["output"])
        y = sh.reduce_scatter(y, "b s d", over=self.across, onto="s")
        if "output_bias" in self.parameters:
            add_to(y, p["output_bias"])
        return y, (x, mixed, qk_saved, attended)

    def backward_input(self, sh, p, saved, dy):
        x, mixed, qk_saved, attended = saved
        dy_whole = sh.all_gather(dy, "b s d", "s", across=self.across)
        dmixed = einsum(f"bsd,{self.across}kd->bs{self.across}k", dy_whole, p["output"])
        if self.alibi is not None:
            dmixed = _with_last(dmixed, 0)  # a 0 for the number that the forward removed
        gradients: dict[str, Array] = dict(zip(PROJECTIONS, self.context.backward(sh, attended, dmixed), strict=True))
        if self.alibi is not None:
            self.alibi.narrow(gradients, x.dtype)
        scale_gradients = self.qk_norm_rope.backward(sh, p, qk_saved, gradients)
        parts = (einsum(f"bs{h}k,d{h}k->bsd", gradients[name], p[name]) for name, h in self.heads.items())
        dx = reduce(add_to, parts)
        dx = sh.start_reduce_scatter(dx, "b s d", over=self.across, onto="s")
        return dx, (x, gradients, scale_gradients, mixed, dy_whole, dy)

    def backward_weight(self, sh, rest, g):
        x, gradients, scale_gradients, mixed, dy_whole, dy = rest
        for name, h in self.heads.items():
            g.einsum(name, f"bsd,bs{h}k->d{h}k", x, gradients[name])
            if f"{name}_bias" in self.parameters:
                g.einsum(f"{name}_bias", f"bs{h}k->{h}k", gradients[name])
        for name, gradient in scale_gradients.items():
            g.add(name, gradient)
        g.einsum("output", f"bs{self.across}k,bsd->{self.across}kd", mixed, dy_whole)
        if "output_bias" in self.parameters:
            g.einsum("output_bias", "bsd->d", dy)


#: Keywords of earlier releases, and the fields of an AttentionConfig that they are now.
_RENAMED = {
    "norm_together": "qk_norm_all_heads",
    "turned_first": "rope_before_norm",
    "scale": "attention_scale",
    "cap": "attention_cap",
}


def _with_fields(config: AttentionConfig, fields: dict[str, Any]) -> AttentionConfig:
    """``config`` with some fields by name, among them those of earlier releases."""
    fields = {_RENAMED.get(name, name): value for name, value in fields.items()}
    if (epsilon := fields.pop("norm_epsilon", None)) is not None:
        fields |= {"qk_norm": True, "epsilon": epsilon}
    if isinstance(fields.get("rotary"), Rotary):
        fields["rotary"] = fields["rotary"].options
    return config.changed(**fields)


def _dims(*letters: str) -> str:
    """Letters as a parameter's dims: "d h r k"."""
    return " ".join("".join(letters))


# --- ALiBi: scores that fall with the distance of the key


class Alibi:
    """Scores q · k / sqrt(k) + slope[h] · t for keys at position t, by one more number in queries and keys

    Subtracting slope · s, with s the query's position, does not change the softmax: so this is a penalty on the
    distance s - t. Since keys contain their positions, they can be cached and sent to other ranks as any others. The
    additional number is the head's slope in queries, and 0 in values, where it is removed after mixing. Press et al.,
    "Train short, test long" (2022): slopes are 2^(-8 i / n) for heads i from 1 to n; if n is not a power of 2, those of
    the next power, first every other of them.
    """

    def __init__(self, heads: str, sizes: Mapping[str, int], steepest: float) -> None:
        """``heads`` are the letters of queries' heads; slopes are from 2^(-``steepest`` / n) to 2^-``steepest``."""
        self.heads, self.sizes = heads, sizes
        self.slopes = _slopes(prod(sizes[letter] for letter in heads), steepest)

    def widen(self, sh: Shards, q: Array, k: Array, v: Array, positions: Array) -> tuple[Array, Array, Array]:
        """q, k and v with one more number each; ``positions`` are [s], or [b s]."""
        xp, width = backend_of(q).xp, q.shape[-1]
        slopes = xp.asarray(self.slopes, dtype=accumulated_in(q.dtype)).reshape(
            [self.sizes[letter] for letter in self.heads]
        )
        slopes = slopes[tuple(sh.span(letter, self.sizes[letter]) for letter in self.heads)]
        key_positions = xp.asarray(positions, dtype=accumulated_in(q.dtype))
        key_positions = key_positions.reshape(*([1] * (2 - key_positions.ndim)), *key_positions.shape, 1)
        scale = sqrt(width + 1)  # the divisor of the scores
        return (
            _with_last(widened(q) * (scale / sqrt(width)), slopes * scale),
            _with_last(k, key_positions),
            _with_last(v, 0),
        )

    @staticmethod
    def narrow(gradients: dict[str, Array], dtype: Any) -> None:
        """Replace the gradients of widened queries, keys and values by those of the original ones, in this dtype."""
        for name, gradient in gradients.items():
            width = gradient.shape[-1] - 1
            narrow = gradient[..., :-1]
            narrow = narrow * sqrt((width + 1) / width) if name == "query" else narrow.copy()
            gradients[name] = rounded(narrow, dtype)


def _with_last(x: Array, last: Array | int) -> Array:
    """x[... k] with ``last`` appended to k, in the dtype of sums: as a 16-bit float, a position would be rounded."""
    y = backend_of(x).xp.empty((*x.shape[:-1], x.shape[-1] + 1), accumulated_in(x.dtype))
    y[..., :-1], y[..., -1] = x, last
    return y


def _slopes(heads: int, steepest: float) -> list[float]:
    full = 2 ** ceil(log2(heads))
    slopes = [2.0 ** (-steepest * i / full) for i in range(1, full + 1)]
    return slopes if full == heads else [*slopes[1::2], *slopes[::2]][:heads]
