"""Scores of attention and of the cross-entropy: soft caps, and the softmax in place over them."""

from __future__ import annotations

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.factors import Mask, hide
from spmd_engine.arrays.fused import fused


def soft_cap(x: Array, cap: float) -> None:
    """x = cap · tanh(x / cap), in place."""
    x /= cap
    backend_of(x).xp.tanh(x, out=x)
    x *= cap


def soft_cap_slope(y: Array, cap: float) -> Array:
    """dy/dx of y = cap · tanh(x / cap), by what came out: 1 - (y / cap)²."""
    slope = y / -cap
    slope *= y / cap
    slope += 1.0
    return slope


# --- The elementwise steps of attention's softmax and of the softmax cross-entropy, each in place over its scores


@fused
def exponentiate(scores: Array, shift: Array, mask: Mask | None = None) -> None:
    """scores = exp(scores - shift), in place, and 0 where the mask hides a key."""
    hide(scores, mask)
    scores -= shift
    backend_of(scores).xp.exp(scores, out=scores)


@fused
def softmax_backward(ds: Array, p: Array, projection: Array) -> None:
    """ds = (ds - projection) * p, in place: dp becomes the scores' gradient, with ``projection`` the sum of dp * p."""
    ds -= projection
    ds *= p


@fused
def scores_of_targets(scores: Array, targets: Array, top: Array) -> Array:
    """scores[n v] at targets[n], less top[n], as [n]; 0 where a target is none of v, but another rank's."""
    found = backend_of(scores).xp.zeros(len(targets), scores.dtype)
    ours, columns = _ours(scores, targets)
    found[ours] = scores[ours, columns] - top[ours]
    return found


@fused
def cross_entropy_gradient(p: Array, sums: Array, weights: Array, targets: Array) -> None:
    """p[n v] of exponentials, with sums[n], becomes weights * (p / sums - [v = target]), in place."""
    p *= (weights / sums)[:, None]
    ours, columns = _ours(p, targets)
    p[ours, columns] -= weights[ours]


def _ours(scores: Array, targets: Array) -> tuple[Array, Array]:
    """The rows n of scores[n v] whose target is one of v, and these targets."""
    xp = backend_of(scores).xp
    (ours,) = (targets.astype(xp.uint64) < scores.shape[1]).nonzero()  # a negative number is a very large one there
    return ours, targets[ours]
