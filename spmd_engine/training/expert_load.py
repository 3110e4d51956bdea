"""How busy the experts of a model were in a step: what its side outputs say, in few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any, Self


@dataclass(frozen=True)
class ExpertLoad:
    """Of all layers with experts in one step. A pair is a token and an expert that it chose."""

    pairs: int  #: of the whole batch, in all layers
    dropped: int  #: of these, for want of capacity
    heaviest: float  #: the most pairs of one expert, over the mean of its layer
    where: str  #: that expert, as in "block0/moe expert 3"
    entropy: float  #: of the router's scores, the mean over layers, as a share of the most there could be

    @classmethod
    def of(cls, side_outputs: Mapping[str, Any] | None) -> Self | None:
        """From the side outputs of a step; None if no layer has experts."""
        loads = _ending(side_outputs or {}, "/load")
        if not loads:
            return None
        ratios = {
            (max(load) * len(load) / max(1, sum(load)), f"{layer} expert {load.index(max(load))}")
            for layer, load in loads.items()
        }
        heaviest, where = max(ratios)
        shares = [
            value / log(len(loads[layer]))
            for layer, value in _ending(side_outputs, "/entropy").items()
            if len(loads[layer]) > 1
        ]
        pairs, dropped = sum(map(sum, loads.values())), sum(_ending(side_outputs, "/dropped").values())
        return cls(round(pairs), round(dropped), heaviest, where, sum(shares) / max(1, len(shares)))

    @property
    def drops_most(self) -> bool:
        """Whether more than half of all pairs were dropped: too little capacity to learn with."""
        return 2 * self.dropped > self.pairs

    def __str__(self) -> str:
        lost = f"{self.dropped:,} of {self.pairs:,} choices dropped" if self.dropped else "none dropped"
        return (
            f"experts: the busiest, {self.where}, has {self.heaviest:.2f} x the mean; "
            f"scores have {self.entropy:.0%} of the most entropy; {lost}"
        )


def _ending(side_outputs: Mapping[str, Any], end: str) -> dict[str, Any]:
    return {name.removesuffix(end): value for name, value in side_outputs.items() if name.endswith(end)}
