"""What an expert computes of its rows: written for several experts side by side, each with rows of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_engine.arrays import einsum
from spmd_engine.arrays.activations import silu_gate
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.layer import GradientSums
from spmd_engine.layers.mlp import ACTIVATIONS

#: Of each expert: its parameters, and which of all rows are its own.
Experts = Sequence[tuple[Mapping[str, Array], slice]]


class Perceptron:
    """y[t d] = activation(x[t d] · w0[d f]) · w1[f d], of every expert for its own rows t: without biases

    With f cut, y and dx are unreduced over f, as are those of an MLP before its reduction. The products are one an
    expert; what goes element by element is done for the rows of all experts at once.
    """

    def __init__(self, activation: str = "gelu", std: float = 0.02, out_std: float = 0.02) -> None:
        self.activation = ACTIVATIONS[activation]
        self.parameters = {"w0": Parameter("d f", std=std), "w1": Parameter("f d", std=out_std)}

    def forward(self, experts: Experts, x: Array, hidden: int, want_slope: bool) -> tuple[Array, Any]:
        """y[t d] of x[t d], and what the backward needs; ``hidden`` is how much of f is here."""
        xp = backend_of(x).xp
        z, y = xp.empty((len(x), hidden), x.dtype), xp.empty_like(x)
        for p, rows in experts:
            einsum("td,df->tf", x[rows], p["w0"], out=z[rows])
        h, slope = self.activation(z, want_slope=want_slope)
        for p, rows in experts:
            einsum("tf,fd->td", h[rows], p["w1"], out=y[rows])
        return y, (x, h, slope)

    def backward_input(self, experts: Experts, saved: Any, dy: Array) -> tuple[Array, Any]:
        """dx[t d], and what the weights' gradients need."""
        x, h, slope = saved
        xp = backend_of(dy).xp
        dz, dx = xp.empty_like(h), xp.empty_like(x)
        for p, rows in experts:
            einsum("td,fd->tf", dy[rows], p["w1"], out=dz[rows])
        dz *= slope
        for p, rows in experts:
            einsum("tf,df->td", dz[rows], p["w0"], out=dx[rows])
        return dx, (x, h, dz, dy)

    def backward_weight(self, rest: Any, gradients: Sequence[tuple[GradientSums, slice]]) -> None:
        """Add the gradients of each expert's parameters, from its rows alone."""
        x, h, dz, dy = rest
        for g, rows in gradients:
            g.einsum("w0", "td,tf->df", x[rows], dz[rows])
            g.einsum("w1", "tf,td->fd", h[rows], dy[rows])


class GatedPerceptron:
    """y[t d] = (silu(x[t d] · gate[d f]) · (x · up[d f])) · down[f d], of every expert for its own rows"""

    def __init__(self, std: float = 0.02, out_std: float = 0.02) -> None:
        self.parameters = {
            "gate": Parameter("d f", std=std),
            "up": Parameter("d f", std=std),
            "down": Parameter("f d", std=out_std),
        }

    def forward(self, experts: Experts, x: Array, hidden: int, want_slope: bool) -> tuple[Array, Any]:
        """y[t d] of x[t d], and what the backward needs; ``hidden`` is how much of f is here."""
        xp = backend_of(x).xp
        z, u, y = xp.empty((len(x), hidden), x.dtype), xp.empty((len(x), hidden), x.dtype), xp.empty_like(x)
        for p, rows in experts:
            einsum("td,df->tf", x[rows], p["gate"], out=z[rows])
            einsum("td,df->tf", x[rows], p["up"], out=u[rows])
        h, slopes = silu_gate(z, u, want_slopes=want_slope)
        for p, rows in experts:
            einsum("tf,fd->td", h[rows], p["down"], out=y[rows])
        return y, (x, h, slopes)

    def backward_input(self, experts: Experts, saved: Any, dy: Array) -> tuple[Array, Any]:
        """dx[t d], and what the weights' gradients need."""
        x, h, slopes = saved
        xp = backend_of(dy).xp
        dh, dx = xp.empty_like(h), xp.empty_like(x)
        for p, rows in experts:
            einsum("td,fd->tf", dy[rows], p["down"], out=dh[rows])
        dz, du = (dh * slope for slope in slopes)
        for p, rows in experts:
            einsum("tf,df->td", dz[rows], p["gate"], out=dx[rows])
            einsum("tf,df->td", du[rows], p["up"], out=dx[rows], accumulate=True)
        return dx, (x, h, dz, du, dy)

    def backward_weight(self, rest: Any, gradients: Sequence[tuple[GradientSums, slice]]) -> None:
        """Add the gradients of each expert's parameters, from its rows alone."""
        x, h, dz, du, dy = rest
        for g, rows in gradients:
            g.einsum("gate", "td,tf->df", x[rows], dz[rows])
            g.einsum("up", "td,tf->df", x[rows], du[rows])
            g.einsum("down", "tf,td->fd", h[rows], dy[rows])


# --- Experts that every token goes through, beside those that a router chooses


_GATE = "shared_gate"


class SharedExperts:
    """y[t d] = Σ_i shared_i(x[t d]), times sigmoid(x · shared_gate[d]) if they are ``weighted``: so ``many`` of a kind

    One of m times the width is m of them, whose hidden numbers lie side by side. With f cut, y and dx are unreduced
    over f. The weight is whole on all ranks along f, but its gradient, like all that follows, is linear in the parts
    of y, and so stays unreduced: that of shared_gate is summed over f as well.
    """

    def __init__(self, perceptron: Perceptron | GatedPerceptron, many: int, weighted: bool, std: float) -> None:
        self.perceptron, self.many, self.weighted = perceptron, many, weighted
        self.parameters: dict[str, Parameter] = {}
        for number in range(many):
            self.parameters |= {f"shared{number}/{own}": each for own, each in perceptron.parameters.items()}
        if weighted:
            self.parameters[_GATE] = Parameter("d", std=std, summed="bsf")

    def forward(self, p: Mapping[str, Any], x: Array, hidden: int, keep: bool) -> tuple[Array | None, Any]:
        """y of x, and what the backward needs; None: there are none. ``hidden`` is how much of f is here."""
        y, saved = None, []
        for number in range(self.many):
            own, of_own = self.perceptron.forward([(p[f"shared{number}"], slice(0, len(x)))], x, hidden, keep)
            if y is not None:
                own += y
            y = own
            saved.append(of_own)
        if not self.weighted:
            return y, (saved, None)
        weights = _sigmoid(einsum("td,d->t", x, p[_GATE]))
        return y * weights[:, None], (saved, (x, y, weights))

    def backward_input(self, p: Mapping[str, Any], saved: Any, dy: Array) -> tuple[Array | None, Any]:
        """dx, and what the weights' gradients need."""
        saved, of_gate = saved
        dx, of_logits = None, None
        if of_gate is not None:
            x, y, weights = of_gate
            dlogits = (dy * y).sum(axis=1) * (weights * (1.0 - weights))
            dx, of_logits = dlogits[:, None] * p[_GATE], (x, dlogits)
            dy = dy * weights[:, None]
        rests = []
        for number, of_own in enumerate(saved):
            own, rest = self.perceptron.backward_input([(p[f"shared{number}"], slice(0, len(dy)))], of_own, dy)
            if dx is not None:
                own += dx
            dx = own
            rests.append(rest)
        return dx, (rests, of_logits, slice(0, len(dy)))

    def backward_weight(self, rest: Any, g: GradientSums) -> None:
        """Add the gradients of all of them."""
        rests, of_logits, rows = rest
        for number, each in enumerate(rests):
            self.perceptron.backward_weight(each, [(g[f"shared{number}"], rows)])
        if of_logits is not None:
            x, dlogits = of_logits
            g.einsum(_GATE, "td,t->d", x, dlogits)


def _sigmoid(z: Array) -> Array:
    """1 / (1 + exp(-z)), where nothing overflows."""
    xp = backend_of(z).xp
    small = xp.exp(-xp.abs(z))
    return xp.where(z < 0, small, 1.0) / (1.0 + small)
