"""A residual branch: x + dropout(inner(norm(x)))."""

from spmd_engine.layers.dropout import Dropout
from spmd_engine.layers.later import Later, then
from spmd_engine.layers.layer import Layer
from spmd_engine.layers.norm import LayerNorm


class Residual(Layer):
    """y = x + dropout(inner(norm(x))), x and y being [b s d]

    The branch's parameters, buffers and side outputs keep their names, the norm's parameters stand under ``norm/``.
    """

    def __init__(self, norm: LayerNorm, inner: Layer, dropout: float = 0.0):
        self.norm, self.inner, self.dropout = norm, inner, Dropout(dropout)
        self.may_cut, self.across, self.attends = inner.may_cut, inner.across, inner.attends
        self.sizes = {**norm.sizes, **inner.sizes}
        self.parameters = {f"norm/{name}": parameter for name, parameter in norm.parameters.items()}
        self.parameters |= inner.parameters
        self.buffers, self.side_outputs = dict(inner.buffers), dict(inner.side_outputs)

    def cost(self, length):
        return self.inner.cost(length)

    def forward(self, sh, p, x, ctx):
        y, from_norm = self.norm.forward(sh, p["norm"], x, ctx)
        y, from_inner, *extra = self.inner.forward(sh, p, y, ctx)
        y, mask = self.dropout.forward(sh, y, ctx)
        return x + y, (from_norm, from_inner, mask), *extra

    def backward_input(self, sh, p, saved, dy, *side):
        from_norm, from_inner, mask = saved
        branch = self.dropout.backward(mask, dy)
        branch, inner_rest = self.inner.backward_input(sh, p, from_inner, branch, *side)
        norm_rest = []

        def through_norm(branch):
            branch, rest = self.norm.backward_input(sh, p["norm"], from_norm, branch)
            norm_rest.append(rest)
            branch += dy
            return branch

        dx = then(branch, through_norm)  # while it travels, the inner layer's weights get their gradients
        return dx, (inner_rest, norm_rest, dx if isinstance(dx, Later) else None)

    def backward_weight(self, sh, rest, g):
        inner_rest, norm_rest, under_way = rest
        self.inner.backward_weight(sh, inner_rest, g)
        if under_way is not None:
            under_way.finish()
        self.norm.backward_weight(sh, norm_rest[0], g["norm"])
