"""Numbers that NumPy's text, the compiled loops and the CUDA kernels of one function share."""

from __future__ import annotations

from math import pi, sqrt
from typing import NamedTuple

#: GELU is z / (1 + exp(-2u)) with u = GELU_C (z + GELU_A z^3).
GELU_C = sqrt(2.0 / pi)
GELU_A = 0.044715


class AdamWFactors(NamedTuple):
    """What the update of a step multiplies with, in the order in which the kernels take them."""

    fresh: float  # the gradient, in the mean
    beta1: float
    weight: float  # the square of a gradient that was multiplied by ``fresh``
    beta2: float
    epsilon: float
    size: float
    kept: float  # the parameter


def adamw_factors(
    *, step: int, rate: float, betas: tuple[float, float], epsilon: float, decay: float, scale: float
) -> AdamWFactors:
    """Those of p = kept p - size mean / (sqrt(square) + epsilon), which is Adam's quotient with one division."""
    beta1, beta2 = betas
    fresh, correction = 1.0 - beta1, sqrt(1.0 - beta2**step)
    return AdamWFactors(
        scale * fresh,
        beta1,
        (1.0 - beta2) / fresh**2,
        beta2,
        epsilon * correction,
        rate / (1.0 - beta1**step) * correction,
        1.0 - rate * decay,
    )
