"""A branch of the residual stream: inner(norm(x)), whose result may be normalised as well, and scaled."""

from spmd_engine.layers.contract import check_declarations
from spmd_engine.layers.later import Later, then
from spmd_engine.layers.layer import Layer


class Branch(Layer):
    """y = scale · after(inner(norm(x))), x and y being [b s d]; each of the two norms only if it is given

    The inner layer's parameters, buffers and side outputs keep their names, the norms' parameters stand under
    ``norm/`` and ``norm_after/``, if it has any.
    """

    def __init__(self, norm: Layer | None, inner: Layer, *, after: Layer | None = None, scale: float = 1.0):
        check_declarations(inner)
        self.norm, self.inner, self.after, self.scale = norm, inner, after, scale
        self.may_cut, self.across, self.attends = inner.may_cut, inner.across, inner.attends
        self.sizes, self.parameters = {}, {}
        if norm is not None:
            self.sizes |= norm.sizes
            self.parameters |= {f"norm/{name}": parameter for name, parameter in norm.parameters.items()}
        self.sizes |= inner.sizes
        self.parameters |= inner.parameters
        if after is not None:
            self.parameters |= {f"norm_after/{name}": parameter for name, parameter in after.parameters.items()}
        self.buffers, self.side_outputs = dict(inner.buffers), dict(inner.side_outputs)

    def cost(self, length):
        return self.inner.cost(length)

    def forward(self, sh, p, x, ctx):
        from_norm = from_after = None
        if self.norm is not None:
            x, from_norm = self.norm.forward(sh, p.get("norm", {}), x, ctx)
        y, from_inner, *extra = self.inner.forward(sh, p, x, ctx)
        if self.after is not None:
            y, from_after = self.after.forward(sh, p.get("norm_after", {}), y, ctx)
        if self.scale != 1:
            y = y * self.scale
        return y, (from_norm, from_inner, from_after), *extra

    def backward_input(self, sh, p, saved, dy, *side):
        from_norm, from_inner, from_after = saved
        after_rest, norm_rest = None, []
        if self.scale != 1:
            dy = dy * self.scale
        if self.after is not None:
            dy, after_rest = self.after.backward_input(sh, p.get("norm_after", {}), from_after, dy)
        dx, inner_rest = self.inner.backward_input(sh, p, from_inner, dy, *side)

        def through_norm(dx):
            dx, rest = self.norm.backward_input(sh, p.get("norm", {}), from_norm, dx)
            norm_rest.append(rest)
            return dx

        if self.norm is not None:
            dx = then(dx, through_norm)  # while it travels, the inner layer's weights get their gradients
        return dx, (inner_rest, norm_rest, after_rest, dx if isinstance(dx, Later) else None)

    def backward_weight(self, sh, rest, g):
        inner_rest, norm_rest, after_rest, under_way = rest
        self.inner.backward_weight(sh, inner_rest, g)
        if self.after is not None:
            self.after.backward_weight(sh, after_rest, g["norm_after"])
        if under_way is not None:
            under_way.finish()
        if self.norm is not None:
            self.norm.backward_weight(sh, norm_rest[0], g["norm"])
