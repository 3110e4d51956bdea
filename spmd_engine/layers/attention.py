"""Causal multi-head self-attention: heads are cut, so each rank attends with its own."""

from spmd_engine.arrays import einsum
from spmd_engine.arrays.attention import causal_attention, causal_attention_backward
from spmd_engine.layers.layer import Layer, Parameter

PROJECTIONS = ("query", "key", "value")


class Attention(Layer):
    """q, k, v[b s h k] = x[b s d] · w[d h k] + bias[h k]
    y[b s d] = softmax(mask(q · k / sqrt(k))) · v · output[h k d] + bias[d]

    With h cut, the projections are column-parallel and the output is row-parallel, as in the MLP. Queries and
    keys of one rank are whole along s; a cut s on the residual stream is gathered first.
    """

    may_cut, across = "bh", "h"  # with s cut, a rank's queries would not see the other ranks' keys

    def __init__(self, width: int, heads: int, *, std: float = 0.02, out_std: float = 0.02):
        self.sizes = {"d": width, "h": heads, "k": width // heads}
        weights = {name: Parameter("d h k", std=std) for name in PROJECTIONS}
        biases = {f"{name}_bias": Parameter("h k", decay=False) for name in PROJECTIONS}
        self.parameters = {
            **weights,
            **biases,
            "output": Parameter("h k d", std=out_std),
            "output_bias": Parameter("d", decay=False, where="residual"),
        }

    def forward(self, sh, p, x, at):
        x = sh.all_gather(x, "b s d", "s", across="h")
        q, k, v = (einsum("bsd,dhk->bshk", x, p[name]) for name in PROJECTIONS)
        q += p["query_bias"]
        k += p["key_bias"]
        v += p["value_bias"]
        mixed, log_sums = causal_attention(q, k, v, at.positions, at.positions)
        y = sh.reduce_scatter(einsum("bshk,hkd->bsd", mixed, p["output"]), "b s d", over="h", onto="s")
        y += p["output_bias"]
        return y, (x, q, k, v, mixed, log_sums, at.positions)

    def backward_input(self, sh, p, saved, dy):
        x, q, k, v, mixed, log_sums, positions = saved
        dy_whole = sh.all_gather(dy, "b s d", "s", across="h")
        dmixed = einsum("bsd,hkd->bshk", dy_whole, p["output"])
        gradients = causal_attention_backward(dmixed, q, k, v, mixed, log_sums, positions, positions)
        dx = sum(einsum("bshk,dhk->bsd", d, p[name]) for name, d in zip(PROJECTIONS, gradients, strict=True))
        return sh.reduce_scatter(dx, "b s d", over="h", onto="s"), (x, gradients, mixed, dy_whole, dy)

    def backward_weight(self, sh, rest, g):
        x, gradients, mixed, dy_whole, dy = rest
        for name, d in zip(PROJECTIONS, gradients, strict=True):
            g.einsum(name, "bsd,bshk->dhk", x, d)
            g.einsum(f"{name}_bias", "bshk->hk", d)
        g.einsum("output", "bshk,bsd->hkd", mixed, dy_whole)
        g.einsum("output_bias", "bsd->d", dy)
