"""A residual branch: x + dropout(branch(x)); and several of them side by side."""

from __future__ import annotations

from collections.abc import Callable

from spmd_engine.errors import UsageError
from spmd_engine.layers.chain import joined
from spmd_engine.layers.contract import check_declarations
from spmd_engine.layers.deferred import Deferred, then, wait_for
from spmd_engine.layers.dropout import Dropout
from spmd_engine.layers.layer import Layer


class Residual(Layer):
    """y = x + dropout(scale · after(inner(norm(x)))), x and y being [b s d]: see ``Branch``, whose names it keeps"""

    def __init__(
        self, norm: Layer | None, inner: Layer, dropout: float = 0.0, *, after: Layer | None = None, scale: float = 1.0
    ):
        self.branch, self.dropout = Branch(norm, inner, after=after, scale=scale), Dropout(dropout)
        self.may_cut, self.across, self.attends = inner.may_cut, inner.across, inner.attends
        self.sizes, self.parameters = self.branch.sizes, self.branch.parameters
        self.buffers, self.side_outputs = self.branch.buffers, self.branch.side_outputs

    @property
    def inner(self):
        """The branch's layer between its norms."""
        return self.branch.inner

    def cost(self, length):
        return self.branch.cost(length)

    def forward(self, sh, p, x, ctx):
        y, saved, *extra = self.branch.forward(sh, p, x, ctx)
        y, mask = self.dropout.forward(sh, y, ctx)
        return x + y, (saved, mask), *extra

    def backward_input(self, sh, p, saved, dy, *side):
        saved, mask = saved
        dx, rest = self.branch.backward_input(sh, p, saved, self.dropout.backward(mask, dy), *side)
        dx = then(dx, lambda dx: _plus(dx, dy))
        return dx, (rest, dx if isinstance(dx, Deferred) else None)

    def backward_weight(self, sh, rest, g):
        rest, under_way = rest
        self.branch.backward_weight(sh, rest, g)
        if under_way is not None:
            under_way.finish()  # it has arrived for the norm: dy need not be kept any longer


class Parallel(Layer):
    """y = x + dropout(Σ_i branch_i(z)), x and y being [b s d], with z = x or, if there is a ``norm`` for all, norm(x)

    The branches see the same input, not each other's results (Wang and Komatsuzaki, "GPT-J-6B", 2021). Parameters stand
    under the names of their branches, those of the norm under ``norm/``. While one branch's input gradient travels, the
    next one's is made. Raises UsageError for side outputs, which are not passed on.
    """

    def __init__(self, *branches: tuple[str, Layer], norm: Layer | None = None, dropout: float = 0.0) -> None:
        if any(branch.side_outputs for _, branch in branches):
            raise UsageError("a Parallel passes no side outputs on")
        self.branches, self.norm, self.dropout = branches, norm, Dropout(dropout)
        self.attends = any(branch.attends for _, branch in branches)
        everything = [*branches, *([("norm", norm)] if norm is not None else [])]
        self.parameters, self.buffers, self.sizes, _ = joined(everything)
        self.may_cut = "".join(dict.fromkeys("".join(branch.may_cut for _, branch in branches)))

    @property
    def side_by_side(self):
        return tuple(branch for _, branch in self.branches)

    def changed(self, do: Callable[[Layer], Layer]) -> Parallel:
        """The same of what ``do`` makes of each branch and of the norm."""
        norm = None if self.norm is None else do(self.norm)
        return Parallel(*((name, do(each)) for name, each in self.branches), norm=norm, dropout=self.dropout.rate)

    def cost(self, length):
        return sum(branch.cost(length) for _, branch in self.branches)

    def forward(self, sh, p, x, ctx):
        z, from_norm = (x, None) if self.norm is None else self.norm.forward(sh, p.get("norm", {}), x, ctx)
        total, saved = None, []
        for name, branch in self.branches:
            y, of_branch = branch.forward(sh, p[name], z, ctx)
            total = y if total is None else _plus(total, y)
            saved.append(of_branch)
        total, mask = self.dropout.forward(sh, total, ctx)
        return x + total, (from_norm, saved, mask)

    def backward_input(self, sh, p, saved, dy):
        from_norm, saved, mask = saved
        dbranch = self.dropout.backward(mask, dy)
        parts, rests, norm_rest = [], [], []
        for (name, branch), of_branch in zip(self.branches, saved, strict=True):
            part, rest = branch.backward_input(sh, p[name], of_branch, dbranch)
            parts.append(part)
            rests.append(rest)

        def together(dx):
            for part in parts[:-1]:
                dx = _plus(dx, wait_for(part))
            if self.norm is not None:
                dx, rest = self.norm.backward_input(sh, p.get("norm", {}), from_norm, dx)
                norm_rest.append(rest)
            return _plus(dx, dy)

        dx = then(parts[-1], together)
        return dx, (rests, norm_rest, dx if isinstance(dx, Deferred) else None)

    def backward_weight(self, sh, rest, g):
        rests, norm_rest, under_way = rest
        for (name, branch), of_branch in zip(self.branches, rests, strict=True):
            branch.backward_weight(sh, of_branch, g[name])
        if under_way is not None:
            under_way.finish()
        if self.norm is not None:
            self.norm.backward_weight(sh, norm_rest[0], g["norm"])


def _plus(x, y):
    """x with y added to it, in its memory."""
    x += y
    return x


# --- A branch of the residual stream: inner(norm(x)), whose result may be normalised as well, and scaled


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
        return dx, (inner_rest, norm_rest, after_rest, dx if isinstance(dx, Deferred) else None)

    def backward_weight(self, sh, rest, g):
        inner_rest, norm_rest, after_rest, under_way = rest
        self.inner.backward_weight(sh, inner_rest, g)
        if self.after is not None:
            self.after.backward_weight(sh, after_rest, g["norm_after"])
        if under_way is not None:
            under_way.finish()
        if self.norm is not None:
            self.norm.backward_weight(sh, norm_rest[0], g["norm"])
