"""What an expert computes of its rows: written for several experts side by side, each with rows of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_engine.arrays import einsum
from spmd_engine.arrays.activations import silu_gate
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.gradients import GradientSums
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
