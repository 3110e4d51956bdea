"""What each layer of a model costs a rank for one micro-batch: what plans are estimated from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from spmd_engine.engine.recompute import Recompute, segments
from spmd_engine.models import Model


@dataclass(frozen=True)
class LayerCosts:
    """Of one layer, on a rank that has its part of a micro-batch. Seconds are of work alone, and of waiting inside."""

    name: str
    forward: float  #: seconds of work
    backward_input: float
    backward_weights: float
    inside_forward: float = 0.0  #: seconds of communication that the layer waits for: tensor and context parallel
    inside_backward: float = 0.0
    sent_forward: int = 0  #: bytes that the rank sends meanwhile
    sent_backward: int = 0
    saved: int = 0  #: bytes kept from the forward to the backward
    output: int = 0  #: bytes of what comes out
    above_forward: int = 0  #: bytes held at most while it runs forward, beyond what it saves
    above_backward: int = 0  #: bytes held at most while it runs backward, beyond what it had saved
    parameters: int = 0  #: elements on the rank, while whole
    tied: int = 0  #: of these, those that another layer has, too

    @property
    def all_forward(self) -> float:
        return self.forward + self.inside_forward

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weights + self.inside_backward


def between(a: LayerCosts, b: LayerCosts, share: float) -> LayerCosts:
    """On the line from ``a`` to ``b``, at this share of the way; beyond them too, but never below 0."""
    values = {}
    for each in fields(LayerCosts):
        low, high = getattr(a, each.name), getattr(b, each.name)
        if isinstance(low, float | int):
            value = max(low + (high - low) * share, 0.0)
            values[each.name] = round(value) if isinstance(low, int) and isinstance(high, int) else value
    return replace(a, **values)


class CutLayers:
    """All layers of a model, cut in one way and with one choice of what is recomputed.

    ``work`` float64[layers] are seconds of each layer for a micro-batch: forward, what is repeated, and backward;
    ``kept`` float64[layers] bytes that a forward leaves for its backward; ``elements`` float64[layers] parameters.
    """

    def __init__(self, model: Model, costs: Sequence[LayerCosts], recompute: str) -> None:
        self.costs = costs
        self.segments = segments(model, range(len(costs)), Recompute(recompute))
        again = np.zeros(len(costs), bool)
        for segment in self.segments:
            if segment.recomputed:
                again[segment.layers.start : segment.layers.stop] = True
        self.again = again
        pairs = list(zip(costs, again.tolist(), strict=True))
        self.work = np.array([each.all_forward * (1 + twice) + each.backward for each, twice in pairs])
        self.whole = float(self.work.sum())
        #: of a micro-batch's way forth and back: without the weights' gradients, and what is repeated
        self.way = sum(each.all_forward + each.backward_input for each in costs)
        #: of the work, seconds of communication inside layers; and bytes that a rank with all layers sends there
        self.inside = sum(each.inside_forward * (1 + twice) + each.inside_backward for each, twice in pairs)
        self.sent = sum(each.sent_forward * (1 + twice) + each.sent_backward for each, twice in pairs)
        self.kept = np.array([0.0 if twice else float(each.saved) for each, twice in pairs])
        for segment in self.segments:
            if segment.recomputed and segment.layers.start > 0:
                self.kept[segment.layers.start] = costs[segment.layers.start - 1].output
        self.all_kept = float(self.kept.sum())
        self.elements = np.array([float(each.parameters) for each in costs])
        self.own_elements = float(sum(each.parameters - each.tied for each in costs))
        numbers = {name: number for number, (name, _) in enumerate(model.layers)}
        #: layer with a tied parameter -> the layer that has it
        self.owners = {
            numbers[name]: numbers[full.rpartition("/")[0]]
            for name, layer in model.layers
            for full in layer.tied.values()
        }
        self.largest_repeated = [
            (segment.layers, sum(costs[layer].saved for layer in segment.layers))
            for segment in self.segments
            if segment.recomputed
        ]

    def __len__(self) -> int:
        return len(self.costs)

    def elements_of(self, layers: Sequence[int]) -> float:
        """Parameters of some layers on one rank: what is tied counts once."""
        here = set(layers)
        twice = sum(self.costs[layer].tied for layer, owner in self.owners.items() if {layer, owner} <= here)
        return float(self.elements[list(layers)].sum()) - twice
