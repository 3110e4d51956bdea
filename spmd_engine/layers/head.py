"""The output head: a score for each word of the vocabulary."""

from spmd_engine.arrays import einsum
from spmd_engine.layers.declarations import Activation, Parameter
from spmd_engine.layers.layer import Layer


class Head(Layer):
    """logits[b s v] = scale · x[b s d] · table[v d]

    With v cut, logits stay cut: the loss reduces maxima and sums, and nobody ever holds all of them. ``tied``
    is the full name of the embedding's table, which then serves here too. When serving, scores are made of the
    positions alone that are ``wanted``.
    """

    may_cut, across = "bsv", "v"
    outputs = Activation("b s v", where="inside")

    def __init__(
        self, vocabulary: int, width: int, *, tied: str | None = None, std: float = 0.02, scale: float = 1.0
    ):
        self.sizes, self.scale = {"v": vocabulary, "d": width}, scale
        self.parameters = {"table": Parameter("v d", std=std)}
        self.tied = {"table": tied} if tied else {}

    def forward(self, sh, p, x, ctx):
        x = sh.all_gather(x, "b s d", "s", across="v")
        if ctx.wanted is not None:
            x = x[ctx.wanted][:, None]
        if self.scale != 1:
            x = x * self.scale
        return einsum("bsd,vd->bsv", x, p["table"]), x

    def backward_input(self, sh, p, saved, dy):
        dx = einsum("bsv,vd->bsd", dy, p["table"])
        if self.scale != 1:
            dx *= self.scale
        dx = sh.start_reduce_scatter(dx, "b s d", over="v", onto="s")
        return dx, (saved, dy)

    def backward_weight(self, sh, rest, g):
        x, dy = rest
        g.einsum("table", "bsv,bsd->vd", dy, x)
