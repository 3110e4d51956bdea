"""Embeddings of tokens and positions, and the output head."""

from spmd_engine.arrays import backend_of, einsum
from spmd_engine.arrays.activations import soft_cap, soft_cap_slope
from spmd_engine.arrays.elementwise import add_to
from spmd_engine.arrays.precision import accumulated_in, scaled
from spmd_engine.arrays.scatter import add_rows
from spmd_engine.layers.containers import Dropout
from spmd_engine.layers.declarations import Activation, Parameter
from spmd_engine.layers.layer import Layer


class Embedding(Layer):
    """y[b s d] = table[v d] at v = tokens[b s], times ``scale``

    With v sharded, each rank looks up the tokens of its shard and contributes zeros for the others; the sum over v
    is a reduction. The input has no gradient.
    """

    may_cut, across = "bsv", "v"
    inputs = Activation("b s", where="inside")

    def __init__(self, vocabulary: int, width: int, *, std: float = 0.02, scale: float = 1.0):
        self.sizes, self.scale = {"v": vocabulary, "d": width}, scale
        self.parameters = {"table": Parameter("v d", std=std)}

    def cost(self, length):
        return 0.0  # rows are looked up, not multiplied

    def forward(self, sh, p, x, ctx):
        table = p["table"]
        if not sh.is_sharded("v"):
            y = table[x]
            rows, in_shard = x, None
        else:
            part = sh.span("v", self.sizes["v"])
            xp = backend_of(table).xp
            rows = x.astype(xp.int64) - part.start  # small unsigned tokens would wrap
            in_shard = (rows >= 0) & (rows < table.shape[0])
            y = xp.zeros((*x.shape, table.shape[1]), table.dtype)
            if backend_of(table).on_device and table.size:  # an index of truth values would wait for the device
                rows = xp.where(in_shard, rows, -1)
                y = xp.where(in_shard[..., None], table[rows], y[:1, :1])
            else:
                y[in_shard] = table[rows[in_shard]]
        if self.scale != 1:
            y = scaled(y, self.scale)
        return sh.reduce_scatter(y, "b s d", over="v", onto="s"), (rows, in_shard)

    def backward_input(self, sh, p, saved, dy):
        dy = sh.all_gather(dy, "b s d", "s", across="v")
        return None, (*saved, dy if self.scale == 1 else scaled(dy, self.scale))

    def backward_weight(self, sh, rest, g):
        rows, in_shard, dy = rest
        if in_shard is None or (backend_of(dy).on_device and g.open("table").size):
            add_rows(g.open("table"), rows.reshape(-1), dy.reshape(-1, dy.shape[-1]))
        else:
            add_rows(g.open("table"), rows[in_shard], dy[in_shard])


class Positions(Layer):
    """y[b s d] = dropout(x[b s d] + table[p d] at p = the position of s in its sample)

    The first ``unused`` rows of the table come before position 0 and are never looked up.
    """

    def __init__(self, context: int, width: int, *, unused: int = 0, dropout: float = 0.0, std: float = 0.02):
        self.sizes, self.unused = {"p": unused + context, "d": width}, unused
        self.dropout = Dropout(dropout)
        self.parameters = {"table": Parameter("p d", std=std, where="residual")}

    def cost(self, length):
        return 0.0

    def forward(self, sh, p, x, ctx):
        positions = ctx.residual_positions
        if ctx.documents is not None:
            positions = ctx.documents.learned(positions)
        if self.unused:
            positions = positions + self.unused
        y, mask = self.dropout.forward(sh, {}, x + p["table"][positions], ctx)
        return y, (positions, mask)

    def backward_input(self, sh, p, saved, dy):
        positions, mask = saved
        dx, _ = self.dropout.backward_input(sh, {}, mask, dy)
        return dx, (positions, dx)

    def backward_weight(self, sh, rest, g):
        positions, dx = rest
        if positions.ndim > 1:  # one for each token, repeated in several documents
            add_rows(g.open("table"), positions.reshape(-1), dx.reshape(-1, dx.shape[-1]))
        else:
            g.open("table")[positions] += dx.sum(
                axis=0, dtype=accumulated_in(dx.dtype)
            )  # the positions of one sample are distinct


# --- The output head: a logit for each token of the vocabulary


class Head(Layer):
    """logits[b s v] = scale · x[b s d] · table[v d] + bias[v]; the bias and the cap are optional

    With v sharded, logits stay sharded: the loss reduces maxima and sums, and no rank ever holds all of them. ``tied``
    is the full name of the embedding's table, which is then used here, too. When serving, only the positions in
    ``ctx.wanted`` get logits. With a ``cap``, logits become cap · tanh(logits / cap).
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
            x = scaled(x, self.scale)
        wide = accumulated_in(x.dtype) if ctx.wanted is not None else None  # so that sampling meets no ties
        y = einsum("bsd,vd->bsv", x, p["table"], dtype=wide)
        if "bias" in self.parameters:
            add_to(y, p["bias"])
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
            dx = scaled(dx, self.scale)
        dx = sh.start_reduce_scatter(dx, "b s d", over="v", onto="s")
        return dx, (x, dy)

    def backward_weight(self, sh, rest, g):
        x, dy = rest
        g.einsum("table", "bsv,bsd->vd", dy, x)
        if "bias" in self.parameters:
            g.einsum("bias", "bsv->v", dy)
