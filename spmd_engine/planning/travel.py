"""What storing parameters in parts costs each layer: seconds in which parameters are gathered and gradients summed.

The engine communicates by parameter groups. Under ZeRO-3 the first group of a layer is gathered while the layer before
it computes (``engine.unsharder``), the others when the layer begins, and then nothing hides them; of a repeated
segment all groups are gathered at its beginning. From ZeRO-2 on gradients travel in every micro-batch, at most
``IN_FLIGHT`` groups at a time (``engine.reducer``): what is more is waited for. A rank's link serves one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmd_engine.engine.zero.reducer import IN_FLIGHT
from spmd_engine.planning.collective_time import CollectiveTimes
from spmd_engine.planning.layer_costs import CutLayers

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Travel:
    """Seconds of each layer's groups over some ranks, float64[layers], each alone on its link.

    ``own`` and ``tied`` are, by operation, of groups that are the layer's own and of those that another layer has.
    """

    own: dict[str, np.ndarray]
    tied: dict[str, np.ndarray]
    first: np.ndarray  #: the gather of the group that comes first
    last: np.ndarray  #: the reductions of the groups that come last, as many as may be under way

    @classmethod
    def of(cls, layers: CutLayers, collectives: CollectiveTimes, ranks: Sequence[int], itemsize: int) -> Travel:
        """Of layers whose parameters are stored over these ranks."""
        different, at = layers.different

        def seconds(operation: str, groups: Sequence[Sequence[int]]) -> np.ndarray:
            each = [sum(collectives.of(operation, ranks, size * itemsize).seconds for size in some) for some in groups]
            return np.array(each)[at]

        return cls(
            {name: seconds(name, [each.groups for each in different]) for name in OPERATIONS},
            {name: seconds(name, [each.tied_groups for each in different]) for name in OPERATIONS},
            seconds("all_gather", [(*each.groups, *each.tied_groups)[:1] for each in different]),
            seconds("reduce_scatter", [each.groups[-IN_FLIGHT:] for each in different]),
        )

    def all(self, operation: str) -> np.ndarray:
        """Of all groups that a layer uses."""
        return self.own[operation] + self.tied[operation]

    def forward(self, work: np.ndarray, zero: int) -> np.ndarray:
        """Seconds of each layer's forward, which alone takes ``work``."""
        if zero < 3:
            return work
        return self.all("all_gather") - self.first + np.maximum(work, self.first)

    def backward(self, work: np.ndarray, layers: CutLayers, zero: int) -> np.ndarray:
        """Seconds of each layer's backward, and of its repeated forward."""
        if zero < 2:
            return work
        waited = self.own["reduce_scatter"] - self.last
        if zero < 3:
            return waited + np.maximum(work, self.last)
        gathers = self.all("all_gather")
        first, rest = self.first.copy(), gathers - self.first
        for layer in layers.later_repeated:  # gathered with the segment's first layer, while that computes
            first[layer] = 0.0
            rest[layer] = max(gathers[layer] - layers.forward[layer - 1], 0.0)
        return rest + waited + np.maximum(work, first + self.last)
