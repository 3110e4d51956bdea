"""A residual branch: x + dropout(inner(norm(x)))."""

from spmd_engine.layers.dropout import Dropout
from spmd_engine.layers.layer import Layer
from spmd_engine.layers.norm import LayerNorm


class Residual(Layer):
    """y[b s d] = x[b s d] + dropout(inner(norm(x)))

    The branch's parameters keep their names, the norm's stand under ``norm/``.
    """

    def __init__(self, norm: LayerNorm, inner: Layer, dropout: float = 0.0):
        self.norm, self.inner, self.dropout = norm, inner, Dropout(dropout)
        self.may_cut, self.across = inner.may_cut, inner.across
        self.sizes = {**norm.sizes, **inner.sizes}
        self.parameters = {f"norm/{name}": parameter for name, parameter in norm.parameters.items()}
        self.parameters |= inner.parameters

    def cost(self, length):
        return self.inner.cost(length)

    def forward(self, sh, p, x, at):
        y, from_norm = self.norm.forward(sh, p["norm"], x, at)
        y, from_inner = self.inner.forward(sh, p, y, at)
        y, mask = self.dropout.forward(sh, y, at)
        return x + y, (from_norm, from_inner, mask)

    def backward_input(self, sh, p, saved, dy):
        from_norm, from_inner, mask = saved
        branch = self.dropout.backward(mask, dy)
        branch, inner_rest = self.inner.backward_input(sh, p, from_inner, branch)
        branch, norm_rest = self.norm.backward_input(sh, p["norm"], from_norm, branch)
        branch += dy
        return branch, (norm_rest, inner_rest)

    def backward_weight(self, sh, rest, g):
        norm_rest, inner_rest = rest
        self.inner.backward_weight(sh, inner_rest, g)
        self.norm.backward_weight(sh, norm_rest, g["norm"])
