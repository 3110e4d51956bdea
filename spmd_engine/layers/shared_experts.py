"""Experts that every token goes through, beside those that a router chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.experts import GatedPerceptron, Perceptron
from spmd_engine.layers.gradients import GradientSums

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
