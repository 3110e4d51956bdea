"""Causal multi-head self-attention: heads are cut, so each rank attends with its own."""

from functools import reduce
from operator import iadd

from spmd_engine.arrays import einsum
from spmd_engine.errors import UsageError
from spmd_engine.layers.cache import cached_attention
from spmd_engine.layers.context import ContextMethod
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.gather_keys import GatherKeys
from spmd_engine.layers.layer import Layer

PROJECTIONS = ("query", "key", "value")


class Attention(Layer):
    """q, k, v[b s h k] = x[b s d] · w[d h k] + bias[h k]
    y[b s d] = softmax(mask(q · k / sqrt(k))) · v · output[h k d] + bias[d]

    With h cut, the projections are column-parallel and the output is row-parallel, as in the MLP. A cut s on
    the residual stream is gathered first; s cut inside is the business of ``context``, which brings queries
    and keys together.

    With fewer ``key_value_heads`` than ``heads``, r queries share each key head (Ainslie et al., "GQA", 2023):
    queries are q[b s h r k], and their weights have r besides h. A layout may then cut r instead of h. Keys and
    values are computed alike on all its ranks, but each rank's queries give only a part of their gradients,
    which are unreduced over r: for x as those of the queries are, for the weights as over b and s.
    """

    attends = True

    def __init__(
        self,
        width: int,
        heads: int,
        key_value_heads: int | None = None,
        *,
        context: ContextMethod | None = None,
        std: float = 0.02,
        out_std: float = 0.02,
    ):
        shared = heads if key_value_heads is None else key_value_heads
        if shared < 1 or heads % shared or width % heads:
            raise UsageError(
                f"attention: {heads} heads must divide the width {width}, and {shared} key heads the {heads}"
            )
        self.context = context or GatherKeys()
        self.sizes = {"d": width, "h": shared, "k": width // heads}
        if shared < heads:
            self.sizes["r"] = heads // shared
        self.across = "hr" if shared < heads else "h"
        self.may_cut = "bs" + self.across
        self.heads = {"query": self.across, "key": "h", "value": "h"}  # letters of each projection's heads
        weights, biases = {}, {}
        for name, heads_of in self.heads.items():
            summed = "bs" + self.across.removeprefix(heads_of)  # r over keys and values: queries that share them
            weights[name] = Parameter(_dims("d", heads_of, "k"), std=std, summed=summed)
            biases[f"{name}_bias"] = Parameter(_dims(heads_of, "k"), decay=False, summed=summed)
        self.parameters = {
            **weights,
            **biases,
            "output": Parameter(_dims(self.across, "k", "d"), std=out_std),
            "output_bias": Parameter("d", decay=False, where="residual"),
        }

    def cost(self, length):
        return super().cost(length) + self.sizes["d"] * length  # on average, half the keys twice: scores and values

    def forward(self, sh, p, x, ctx):
        x = sh.all_gather(x, "b s d", "s", across=self.across)
        q, k, v = (einsum(f"bsd,d{h}k->bs{h}k", x, p[name]) for name, h in self.heads.items())
        q += p["query_bias"]
        k += p["key_bias"]
        v += p["value_bias"]
        if ctx.cache is not None:
            mixed, attended = cached_attention(sh, ctx.cache, q, k, v, ctx.positions), None
        else:
            mixed, attended = self.context.forward(sh, q, k, v, ctx)
        y = einsum(f"bs{self.across}k,{self.across}kd->bsd", mixed, p["output"])
        y = sh.reduce_scatter(y, "b s d", over=self.across, onto="s")
        y += p["output_bias"]
        return y, (x, mixed, attended)

    def backward_input(self, sh, p, saved, dy):
        x, mixed, attended = saved
        dy_whole = sh.all_gather(dy, "b s d", "s", across=self.across)
        dmixed = einsum(f"bsd,{self.across}kd->bs{self.across}k", dy_whole, p["output"])
        gradients = dict(zip(PROJECTIONS, self.context.backward(sh, attended, dmixed), strict=True))
        parts = (einsum(f"bs{h}k,d{h}k->bsd", gradients[name], p[name]) for name, h in self.heads.items())
        dx = reduce(iadd, parts)
        dx = sh.start_reduce_scatter(dx, "b s d", over=self.across, onto="s")
        return dx, (x, gradients, mixed, dy_whole, dy)

    def backward_weight(self, sh, rest, g):
        x, gradients, mixed, dy_whole, dy = rest
        for name, h in self.heads.items():
            g.einsum(name, f"bsd,bs{h}k->d{h}k", x, gradients[name])
            g.einsum(f"{name}_bias", f"bs{h}k->{h}k", gradients[name])
        g.einsum("output", f"bs{self.across}k,bsd->{self.across}kd", mixed, dy_whole)
        g.einsum("output_bias", "bsd->d", dy)


def _dims(*letters: str) -> str:
    """Letters as a parameter's dims: "d h r k"."""
    return " ".join("".join(letters))
