"""A plain router: softmax over all experts, the k best, their weights renormalised."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_engine.arrays.backend import Array, backend_of


@dataclass(frozen=True)
class RouterOptions:
    """How tokens choose experts."""

    k: int = 2


@dataclass(frozen=True)
class Choice:
    """Which experts each token chose, and with what weights."""

    experts: Array  #: [t k]
    weights: Array  #: [t k]


def choose(logits: Array, options: RouterOptions, decided: Array | None = None) -> Choice:
    """The k best by logits[t E]; ties go to the lower expert."""
    xp = backend_of(logits).xp
    experts = xp.argsort(-logits, axis=1, kind="stable")[:, : options.k] if decided is None else decided
    best = xp.take_along_axis(logits, experts, axis=1)
    weights = xp.exp(best - best.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return Choice(experts, weights)


def weights_gradient(choice: Choice, dweights: Array, count: int) -> Array:
    """dlogits[t E] for dweights[t k], linear in it."""
    xp = backend_of(dweights).xp
    w = choice.weights
    d = w * (dweights - (w * dweights).sum(axis=1, keepdims=True))
    dlogits = xp.zeros((len(d), count), d.dtype)
    xp.put_along_axis(dlogits, choice.experts, d, axis=1)
    return dlogits
