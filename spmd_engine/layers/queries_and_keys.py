"""What is done to queries and keys before they meet: each head normalised, then turned by its position."""

from __future__ import annotations

from typing import Any

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.root_mean_square import rms_norm, rms_norm_backward, rms_norm_backward_scale
from spmd_engine.arrays.rotary import rotate
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.rotary import Rotary

QUERY_AND_KEY = ("query", "key")


class QueriesAndKeys:
    """q[b s h k], k[b s h k] = rotate(rms_norm(q) · query_norm[k]), the same for k; each of the two steps or none

    Queries are then multiplied by the ``factor``, if one is given: what else divides scores but the root of k.

    ``across`` are the letters of all query heads. Whichever of them is cut, a rank's heads give only a part of the
    gradient of a norm's scale, which all heads share: it is summed over them, too.
    """

    def __init__(
        self, across: str, rotary: Rotary | None = None, norm_epsilon: float | None = None, factor: float = 1.0
    ) -> None:
        self.rotary, self.epsilon, self.factor = rotary, norm_epsilon, factor
        self.parameters = {}
        if norm_epsilon is not None:
            self.parameters = {
                f"{name}_norm": Parameter("k", mean=1.0, decay=False, summed="bs" + across) for name in QUERY_AND_KEY
            }

    def forward(self, p: Any, q: Array, k: Array, positions: Array) -> tuple[Array, Array, Any]:
        """q and k, ready to meet, and what the backward needs; ``positions`` are [s], or [b s]."""
        turn = self.rotary.turn(positions, q) if self.rotary else None
        ready, normals = [], []
        for name, x in zip(QUERY_AND_KEY, (q, k), strict=True):
            if self.epsilon is not None:
                x, *normal = rms_norm(x, p[f"{name}_norm"], self.epsilon)
                normals.append(normal)
            ready.append(x if turn is None else rotate(x, turn, self.rotary.neighbours))
        if self.factor != 1:
            ready[0] = ready[0] * self.factor
        return *ready, (turn, normals)

    def backward(self, p: Any, saved: Any, gradients: dict[str, Array]) -> dict[str, Array]:
        """Make ``gradients`` of what met those of q and k as they were; returns the gradients of the norms' scales."""
        turn, normals = saved
        of_scales = {}
        if self.factor != 1:
            gradients["query"] = gradients["query"] * self.factor
        for number, name in enumerate(QUERY_AND_KEY):
            if turn is not None:
                gradients[name] = rotate(gradients[name], turn, self.rotary.neighbours, back=True)
            if normals:
                normal, inverse = normals[number]
                of_scales[f"{name}_norm"] = rms_norm_backward_scale(gradients[name], normal)
                gradients[name] = rms_norm_backward(gradients[name], normal, inverse, p[f"{name}_norm"])
        return of_scales
