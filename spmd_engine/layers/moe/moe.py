"""A mixture of experts: a router chooses a few perceptrons for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.elementwise import add_to, multiply_by
from spmd_engine.arrays.precision import accumulated_in, rounded, widened
from spmd_engine.comm.pending import then, wait_for
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.layer import GradientSums, Layer
from spmd_engine.layers.mlp import ACTIVATIONS, GATES
from spmd_engine.layers.moe.dispatch import Dispatch
from spmd_engine.layers.moe.router import Router
from spmd_engine.layers.moe.routing import RouterOptions

#: The parameters and the rows of each expert.
Experts = Sequence[tuple[Mapping[str, Array], slice]]


class Perceptron:
    """y[t d] = activation(x[t d] · w0[d f]) · w1[f d], for the rows t of each expert, without biases

    ``gated``: y[t d] = (silu(x[t d] · gate[d f]) · (x · up[d f])) · down[f d]. With f sharded, y and dx are unreduced
    over f, as are those of an MLP before its reduction. There is one product for each expert; elementwise steps are
    for the rows of all experts at once.
    """

    def __init__(self, activation: str = "gelu", *, gated: bool = False, std: float = 0.02, out_std: float = 0.02):
        self.activation = GATES["silu"] if gated else ACTIVATIONS[activation]
        self.first, self.last = (("gate", "up"), "down") if gated else (("w0",), "w1")
        self.parameters = {name: Parameter("d f", std=std) for name in self.first}
        self.parameters[self.last] = Parameter("f d", std=out_std)

    def forward(self, experts: Experts, x: Array, hidden: int, want_slopes: bool) -> tuple[Array, Any]:
        """y[t d] of x[t d], and what the backward needs; ``hidden`` is the size of f on this rank."""
        xp = backend_of(x).xp
        projections = [xp.empty((len(x), hidden), x.dtype) for _ in self.first]
        y = xp.empty_like(x)
        for p, rows in experts:
            for name, z in zip(self.first, projections, strict=True):
                einsum("td,df->tf", x[rows], p[name], out=z[rows])
        h, slopes = self.activation(*projections, want_slopes)
        for p, rows in experts:
            einsum("tf,fd->td", h[rows], p[self.last], out=y[rows])
        return y, (x, h, slopes)

    def backward_input(self, experts: Experts, saved: Any, dy: Array) -> tuple[Array, Any]:
        """dx[t d], and what ``backward_weight`` needs."""
        x, h, slopes = saved
        xp = backend_of(dy).xp
        dh, dx = xp.empty_like(h), xp.empty_like(x)
        for p, rows in experts:
            einsum("td,fd->tf", dy[rows], p[self.last], out=dh[rows])
        if isinstance(slopes, tuple):
            gradients = [dh * slope for slope in slopes]
        else:
            multiply_by(dh, slopes)
            gradients = [dh]
        for p, rows in experts:
            for name, dz in zip(self.first, gradients, strict=True):
                einsum("tf,df->td", dz[rows], p[name], out=dx[rows], accumulate=dz is not gradients[0])
        return dx, (x, h, gradients, dy)

    def backward_weight(self, rest: Any, gradient_sums: Sequence[tuple[GradientSums, slice]]) -> None:
        """Add the gradients of each expert's parameters, from its rows alone."""
        x, h, gradients, dy = rest
        for g, rows in gradient_sums:
            for name, dz in zip(self.first, gradients, strict=True):
                g.einsum(name, "td,tf->df", x[rows], dz[rows])
            g.einsum(self.last, "tf,td->fd", h[rows], dy[rows])


# --- Shared experts, which every token goes through


_GATE = "shared_gate"


class SharedExperts:
    """y[t d] = Σ_i shared_i(x[t d]), times sigmoid(x · shared_gate[d]) if ``weighted``, over ``count`` equal experts

    One expert of m times the hidden width is stored as m of them. With f sharded, y and dx are unreduced over f. The
    weight is replicated along f, but its gradient is linear in the unreduced y, and so stays unreduced: that of
    shared_gate is summed over f as well.
    """

    def __init__(self, perceptron: Perceptron, count: int, weighted: bool, std: float) -> None:
        self.perceptron, self.count, self.weighted = perceptron, count, weighted
        self.parameters: dict[str, Parameter] = {}
        for number in range(count):
            self.parameters |= {f"shared{number}/{key}": parameter for key, parameter in perceptron.parameters.items()}
        if weighted:
            self.parameters[_GATE] = Parameter("d", std=std, summed="bsf")

    def forward(self, p: Mapping[str, Any], x: Array, hidden: int, keep: bool) -> tuple[Array | None, Any]:
        """y of x, or None without experts, and what the backward needs; ``hidden`` is the size of f on this rank."""
        y, saved = None, []
        for number in range(self.count):
            y_i, expert_saved = self.perceptron.forward([(p[f"shared{number}"], slice(0, len(x)))], x, hidden, keep)
            if y is not None:
                y_i += y
            y = y_i
            saved.append(expert_saved)
        if not self.weighted:
            return y, (saved, None)
        assert y is not None, "a weight goes with a shared expert"
        logits = einsum("td,d->t", x, p[_GATE], dtype=accumulated_in(x.dtype))
        xp = backend_of(logits).xp
        small = xp.exp(-xp.abs(logits))
        weights = xp.where(logits < 0, small, 1.0) / (1.0 + small)  # the sigmoid, without overflow
        return rounded(y * weights[:, None], y.dtype), (saved, (x, y, weights))

    def backward_input(self, p: Mapping[str, Any], saved: Any, dy: Array) -> tuple[Array | None, Any]:
        """dx, and what ``backward_weight`` needs."""
        saved, gate_saved = saved
        dx, gate_rest = None, None
        if gate_saved is not None:
            x, y, weights = gate_saved
            dlogits = (widened(dy) * widened(y)).sum(axis=1) * (weights * (1.0 - weights))
            dx, gate_rest = rounded(dlogits[:, None] * p[_GATE], dy.dtype), (x, dlogits)
            dy = rounded(dy * weights[:, None], dy.dtype)
        rests = []
        for number, expert_saved in enumerate(saved):
            dx_i, rest = self.perceptron.backward_input([(p[f"shared{number}"], slice(0, len(dy)))], expert_saved, dy)
            if dx is not None:
                dx_i += dx
            dx = dx_i
            rests.append(rest)
        return dx, (rests, gate_rest, slice(0, len(dy)))

    def backward_weight(self, rest: Any, g: GradientSums) -> None:
        """Add the gradients of all experts and of the gate."""
        rests, gate_rest, rows = rest
        for number, expert_rest in enumerate(rests):
            self.perceptron.backward_weight(expert_rest, [(g[f"shared{number}"], rows)])
        if gate_rest is not None:
            x, dlogits = gate_rest
            g.einsum(_GATE, "td,t->d", x, dlogits)


# --- A mixture of experts: each token goes through a few of many perceptrons, which a router chooses


class MoE(Layer):
    """y[b s d] = Σ_j weight_j · expert_j(x[b s d]) over the k experts that a token chose + Σ_i shared_i(x)

    A rank has the experts of its shard of e, each with f sharded as in an MLP. An all_to_all along the axes of e sends
    tokens to their experts, and another one returns the results, so an expert sees the tokens of all ranks along these
    axes, and its gradient is summed over the other axes only. The results are unreduced over f; they are combined at
    the source and reduced together with those of the shared experts, which are computed meanwhile.

    In the backward the gradient of the combination's weights is unreduced over f. All later steps are linear in it, so
    it stays unreduced: one reduction of dx serves experts and router, and the router's gradient is summed over f as
    well. Auxiliary losses are replicated along f: only the first rank adds their gradients.

    ``activation`` and ``gated`` are those of each ``Perceptron``. With a ``shared_gate``, the result of the shared
    experts is weighted by a sigmoid: see ``SharedExperts``.
    """

    may_cut, across = "bsfe", "f"

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        router: RouterOptions | None = None,
        *,
        shared: int = 0,
        shared_gate: bool = False,
        activation: str = "gelu",
        gated: bool = False,
        std: float = 0.02,
        out_std: float = 0.02,
    ) -> None:
        self.router = Router(width, experts, router or RouterOptions(), std)
        self.sizes = {"d": width, "f": hidden, "e": experts, "E": experts}
        self.perceptron = Perceptron(activation, gated=gated, std=std, out_std=out_std)
        self.shared = SharedExperts(self.perceptron, shared, shared_gate, std)
        self.parameters = {**self.router.parameters, **self.shared.parameters}
        for number in range(experts):
            for name, parameter in self.perceptron.parameters.items():
                self.parameters[f"expert{number}/{name}"] = replace(parameter, element=("e", number))
        self.buffers, self.side_outputs = self.router.buffers, self.router.side_outputs

    def cost(self, length):
        active = (self.router.options.top_k + self.shared.count) * len(self.perceptron.parameters)
        return float(self.sizes["d"] * (active * self.sizes["f"] + self.sizes["E"]))

    def forward(self, sh, p, x, ctx):
        x = sh.all_gather(x, "b s d", "s", across="f")
        shape, x = x.shape, x.reshape(-1, x.shape[2])
        keep = ctx.training and ctx.saving
        routed = self.router.forward(sh, p, x, shape[0], ctx)
        dispatch = Dispatch(sh, routed.experts, self.sizes["e"])
        rows = dispatch.start(x[dispatch.tokens])
        y, shared_saved = self.shared.forward(p, x, self._hidden(sh), keep)  # while tokens are sent
        rows, experts_saved = self.perceptron.forward(
            [(p[f"expert{number}"], span) for number, span in zip(dispatch.here, dispatch.rows, strict=True)],
            wait_for(rows),
            self._hidden(sh),
            keep,
        )
        rows = wait_for(dispatch.start_back(rows))
        y = _sum(dispatch.gathered(rows, shape[2], routed.choices.weights), y)
        y = sh.reduce_scatter(y.reshape(shape), "b s d", over="f", onto="s")
        saved = shape, x, routed, dispatch, rows, shared_saved, experts_saved
        return y, saved, *([self.router.extra(routed, ctx)] if ctx.training and ctx.decided is None else [])

    def backward_input(self, sh, p, saved, dy, *side):
        shape, x, routed, dispatch, rows, shared_saved, experts_saved = saved
        dy = sh.all_gather(dy, "b s d", "s", across="f").reshape(-1, shape[2])
        drows, dweights = dispatch.gradients(dy, rows, routed.choices.weights)
        drows = dispatch.start(drows)
        dx, shared_rest = self.shared.backward_input(p, shared_saved, dy)  # while gradients are sent
        dlogits = self.router.backward(sh, routed, dweights, *side or [{}])
        dx = _sum(einsum("tE,dE->td", dlogits, p["router"], dtype=dy.dtype), dx)
        experts = [(p[f"expert{number}"], span) for number, span in zip(dispatch.here, dispatch.rows, strict=True)]
        drows, rest = self.perceptron.backward_input(experts, experts_saved, wait_for(drows))

        def combined(drows):
            total = _sum(dispatch.gathered(drows, shape[2]), dx)
            return sh.reduce_scatter(total.reshape(shape), "b s d", over="f", onto="s")

        # The rows' gradients are sent while those of the experts' weights are computed.
        return then(dispatch.start_back(drows), combined), (x, dlogits, dispatch, rest, shared_rest)

    def backward_weight(self, sh, rest, g):
        x, dlogits, dispatch, rest, shared_rest = rest
        g.einsum("router", "td,tE->dE", x, dlogits)
        experts = zip(dispatch.here, dispatch.rows, strict=True)
        self.perceptron.backward_weight(rest, [(g[f"expert{number}"], span) for number, span in experts])
        self.shared.backward_weight(shared_rest, g)

    def _hidden(self, sh):
        """The size of f on this rank."""
        span = sh.span("f", self.sizes["f"])
        return span.stop - span.start


def _sum(x: Array, other: Array | None) -> Array:
    """Add ``other``, if there is one, to ``x`` in place, and return ``x``."""
    if other is not None:
        add_to(x, other)
    return x
