"""Which layers each stage of a pipeline should have: the division whose slowest stage is quickest, and fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

#: Whether chunk k has room for layers i to j - 1, for all i and j at once: fits(k)[i, j].
Fits = Callable[[int], np.ndarray]


def best_division(
    work: Sequence[float],
    chunks: int,
    *,
    boundary: Sequence[float] = (),
    fits: Fits | None = None,
    paces: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """The first layer of each of ``chunks`` consecutive parts, such that the part that takes longest takes least.

    ``work`` are seconds of each layer for a micro-batch; ``boundary[i]`` seconds that the transfer between layers
    i - 1 and i costs the parts on both sides; ``paces[k]`` how many times as long part k takes as others, on a slower
    rank. By dynamic programming over (chunks, layers): exact, in
    O(chunks layers^2). None if nothing fits.
    """
    layers = len(work)
    if chunks > layers:
        return None
    before = np.array([0.0, *accumulate(work)])
    cost = np.array([*boundary, *[0.0] * (layers + 1 - len(boundary))])
    cost[0] = cost[layers] = 0.0
    part = (before + cost)[None, :] - (before - cost)[:, None]  # [i, j]: of layers i to j - 1
    part[np.tril_indices(layers + 1)] = np.inf  # every part has a layer
    best = np.full(layers + 1, np.inf)  # [j]: of the first k chunks with the first j layers
    best[0] = 0.0
    choices = []
    for k in range(chunks):
        worst = np.maximum(best[:, None], part * paces[k] if len(paces) else part)
        if fits is not None:
            worst = np.where(fits(k), worst, np.inf)
        chosen = layers - np.argmin(worst[::-1], axis=0)  # of equal ones the latest start
        best = worst[chosen, np.arange(layers + 1)]
        choices.append(chosen)
    if not np.isfinite(best[layers]):
        return None
    starts, end = [], layers
    for chosen in reversed(choices):
        end = int(chosen[end])
        starts.append(end)
    return tuple(starts[::-1])


def slowest(work: Sequence[float], starts: Sequence[int]) -> float:
    """Seconds of the part that takes longest."""
    ends = [*starts[1:], len(work)]
    return max(sum(work[first:end]) for first, end in zip(starts, ends, strict=True))
