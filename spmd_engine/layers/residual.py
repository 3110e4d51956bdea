"""A residual branch: x + dropout(inner(norm(x))), whose result may be scaled, and normalised as well."""

from spmd_engine.layers.dropout import Dropout
from spmd_engine.layers.later import Later, then
from spmd_engine.layers.layer import Layer


class Residual(Layer):
    """y = x + dropout(scale · after(inner(norm(x)))), x and y being [b s d]; the norm ``after`` only if it is given

    The branch's parameters, buffers and side outputs keep their names, the norms' parameters stand under ``norm/`` and
    ``norm_after/``.
    """

    def __init__(
        self, norm: Layer, inner: Layer, dropout: float = 0.0, *, after: Layer | None = None, scale: float = 1.0
    ):
        self.norm, self.inner, self.dropout = norm, inner, Dropout(dropout)
        self.after, self.scale = after, scale
        self.may_cut, self.across, self.attends = inner.may_cut, inner.across, inner.attends
        self.sizes = {**norm.sizes, **inner.sizes}
        self.parameters = {f"norm/{name}": parameter for name, parameter in norm.parameters.items()}
        self.parameters |= inner.parameters
        if after is not None:
            self.parameters |= {f"norm_after/{name}": parameter for name, parameter in after.parameters.items()}
        self.buffers, self.side_outputs = dict(inner.buffers), dict(inner.side_outputs)

    def cost(self, length):
        return self.inner.cost(length)

    def forward(self, sh, p, x, ctx):
        y, from_norm = self.norm.forward(sh, p["norm"], x, ctx)
        y, from_inner, *extra = self.inner.forward(sh, p, y, ctx)
        from_after = None
        if self.after is not None:
            y, from_after = self.after.forward(sh, p["norm_after"], y, ctx)
        if self.scale != 1:
            y = y * self.scale
        y, mask = self.dropout.forward(sh, y, ctx)
        return x + y, (from_norm, from_inner, from_after, mask), *extra

    def backward_input(self, sh, p, saved, dy, *side):
        from_norm, from_inner, from_after, mask = saved
        branch, after_rest = self.dropout.backward(mask, dy), None
        if self.scale != 1:
            branch = branch * self.scale
        if self.after is not None:
            branch, after_rest = self.after.backward_input(sh, p["norm_after"], from_after, branch)
        branch, inner_rest = self.inner.backward_input(sh, p, from_inner, branch, *side)
        norm_rest = []

        def through_norm(branch):
            branch, rest = self.norm.backward_input(sh, p["norm"], from_norm, branch)
            norm_rest.append(rest)
            branch += dy
            return branch

        dx = then(branch, through_norm)  # while it travels, the inner layer's weights get their gradients
        return dx, (inner_rest, norm_rest, after_rest, dx if isinstance(dx, Later) else None)

    def backward_weight(self, sh, rest, g):
        inner_rest, norm_rest, after_rest, under_way = rest
        self.inner.backward_weight(sh, inner_rest, g)
        if self.after is not None:
            self.after.backward_weight(sh, after_rest, g["norm_after"])
        if under_way is not None:
            under_way.finish()
        self.norm.backward_weight(sh, norm_rest[0], g["norm"])
