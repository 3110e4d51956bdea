"""The output head: a score for each word of the vocabulary."""

from spmd_engine.arrays import einsum
from spmd_engine.arrays.softmax import soft_cap, soft_cap_slope
from spmd_engine.layers.declarations import Activation, Parameter
from spmd_engine.layers.layer import Layer


class Head(Layer):
    """logits[b s v] = scale · x[b s d] · table[v d], + bias[v] if there is one, capped if there is a cap

    With v cut, logits stay cut: the loss reduces maxima and sums, and nobody ever holds all of them. ``tied``
    is the full name of the embedding's table, which then serves here too. When serving, scores are made of the
    positions alone that are ``wanted``. With a ``cap`` they are cap · tanh(logits / cap).
    """

    may_cut, across = "bsv", "v"
    outputs = Activation("b s v", where="inside")

    def __init__(
        self,
        vocabulary: int,
        width: int,
        *,
        tied: str | None = None,
        bias: bool = False,
        std: float = 0.02,
        scale: float = 1.0,
        cap: float | None = None,
    ):
        self.sizes, self.scale, self.cap = {"v": vocabulary, "d": width}, scale, cap
        self.parameters = {"table": Parameter("v d", std=std)}
        if bias:
            self.parameters["bias"] = Parameter("v", decay=False)
        self.tied = {"table": tied} if tied else {}

    def forward(self, sh, p, x, ctx):
        x = sh.all_gather(x, "b s d", "s", across="v")
        if ctx.wanted is not None:
            x = x[ctx.wanted][:, None]
        if self.scale != 1:
            x = x * self.scale
        y = einsum("bsd,vd->bsv", x, p["table"])
        if "bias" in self.parameters:
            y += p["bias"]
        if self.cap is None:
            return y, (x, None)
        soft_cap(y, self.cap)
        return y, (x, soft_cap_slope(y, self.cap) if ctx.training and ctx.saving else None)

    def backward_input(self, sh, p, saved, dy):
        x, slope = saved
        if slope is not None:
            dy = dy * slope
        dx = einsum("bsv,vd->bsd", dy, p["table"])
        if self.scale != 1:
            dx *= self.scale
        dx = sh.start_reduce_scatter(dx, "b s d", over="v", onto="s")
        return dx, (x, dy)

    def backward_weight(self, sh, rest, g):
        x, dy = rest
        g.einsum("table", "bsv,bsd->vd", dy, x)
        if "bias" in self.parameters:
            g.einsum("bias", "bsv->v", dy)
