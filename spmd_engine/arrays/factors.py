"""Constants and helpers shared by the NumPy code, the compiled loops and the CUDA kernels of a function."""

from __future__ import annotations

from math import pi, prod, sqrt
from typing import Any

#: Functions of which all kernels take 16-bit floats: activations, rotary positions and norms.
OF_HALVES = {
    *("relu", "gelu", "silu_gate", "rotate"),
    *(f"layer_norm{part}" for part in ("", "_backward", "_backward_parameters")),
    *(f"rms_norm{part}" for part in ("", "_backward", "_backward_scale")),
}

#: GELU is z / (1 + exp(-2u)) with u = GELU_C (z + GELU_A z^3).
GELU_C = sqrt(2.0 / pi)
GELU_A = 0.044715

#: Chebyshev coefficients in 2t - 1, for t from 0 to 1, of ln(erfc(x) / t) + x² with t = 2 / (2 + x): made with mpmath.
ERFC = (
    -0.651326859890854715, 0.64196979235649026, 0.0194764732041858363, -0.00956151478680863164,
    -0.000946595344482036866, 0.000366839497852761452, 0.0000425233248069077716, -0.0000202785781125342432,
    -1.62429000464702551e-6, 1.3036558355805232e-6, 1.56264417220661432e-8, -8.52380959149265425e-8,
    6.52905443909885151e-9, 5.05934349555146893e-9, -9.91364156493033077e-10, -2.27365122293183596e-10,
    9.64679110201552779e-11, 2.39403808303910497e-12, -6.88602752649754374e-12, 8.94487927309063026e-13,
    3.13092139934305233e-13, -1.12708223613681822e-13, 3.81090525528089667e-16, 7.10609761360020812e-15,
    -1.52302820144821847e-15, -9.45749457216497888e-17, 1.21023718931011699e-16, -2.81666308858967507e-17,
)  # fmt: skip


def adamw_factors(
    *, step: int, rate: float, betas: tuple[float, float], epsilon: float, decay: float, scale: float
) -> tuple[float, float, float, float, float, float, float]:
    """The factors of p = kept p - size mean / (sqrt(square) + epsilon), Adam's quotient with one division.

    They are, in the order of the kernels' arguments: fresh, of a gradient in the mean; beta1; weight, of the square of
    a gradient that was multiplied by fresh; beta2; epsilon; size; kept.
    """
    beta1, beta2 = betas
    fresh, correction = 1.0 - beta1, sqrt(1.0 - beta2**step)
    weight, size = (1.0 - beta2) / fresh**2, rate / (1.0 - beta1**step) * correction
    return scale * fresh, beta1, weight, beta2, epsilon * correction, size, 1.0 - rate * decay


# --- Arrays of which the last dim stays


def by_row(x: Any) -> Any:
    """x[... d] as [n d]."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def by_group(x: Any, groups: int) -> Any:
    """x[... (g o)] as [g n o]."""
    return x.reshape(prod(x.shape[:-1]), groups, x.shape[-1] // groups).transpose(1, 0, 2)


# --- The pairs of numbers that rotary positions rotate


def halves(x: Any, neighbours: bool) -> tuple[Any, Any]:
    """Views of x[... k]: the first and the second of each pair, (x[2i], x[2i + 1]) or (x[i], x[i + k/2])."""
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])


def over_heads(table: Any, ndim: int) -> Any:
    """[s n] or [b s n] as a factor of [b s ... n], an array of ``ndim`` dims."""
    heads = (1,) * (ndim - 3)
    return table.reshape(*table.shape[:-1], *heads, table.shape[-1])


# --- Which keys attention hides from which queries


Mask = tuple[int, Any]  #: the first masked key, and for the keys from there on [t s]: -inf where hidden, else 0


def unseen(key_positions: Any, positions: Any, window: int | None) -> Any:
    """Whether a key is hidden from a query: it comes after it, or is ``window`` or more positions before it. The two
    arrays broadcast."""
    hidden = key_positions > positions
    if window is not None:
        hidden |= key_positions <= positions - window
    return hidden


def hide(scores: Any, mask: Mask | None) -> None:
    """Add -inf to scores[... t s] where the mask hides a key from a query; rs rows repeat the mask of s."""
    if mask is not None:
        first, hidden = mask
        rows = scores.reshape(*scores.shape[:-1], -1, hidden.shape[1])
        # An addition is many times faster than an assignment through a boolean index.
        rows[..., first:, :, :] += hidden[:, None]
