"""What each layer of a model costs a rank for one micro-batch: what plans are estimated from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

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
    """All layers of a model, cut in one way and with one choice of what is recomputed."""

    def __init__(self, model: Model, costs: Sequence[LayerCosts], recompute: str) -> None:
        self.costs = costs
        self.segments = segments(model, range(len(costs)), Recompute(recompute))
        self.again = np.zeros(len(costs), bool)  #: whether a layer's forward is repeated
        for segment in self.segments:
            if segment.recomputed:
                self.again[segment.layers.start : segment.layers.stop] = True

    def __len__(self) -> int:
        return len(self.costs)

    @cached_property
    def work(self) -> np.ndarray:
        """float64[layers]: seconds of each layer for a micro-batch, forward, repeated forward and backward."""
        repeated = [each.all_forward * twice for each, twice in zip(self.costs, self.again, strict=True)]
        return np.array([each.all_forward + each.backward for each in self.costs]) + repeated

    @cached_property
    def whole(self) -> float:
        """Seconds of all layers for a micro-batch."""
        return float(self.work.sum())

    @cached_property
    def way(self) -> float:
        """Seconds of a micro-batch's way forth and back: without the weights' gradients, and what is repeated."""
        return float(sum(each.all_forward + each.backward_input for each in self.costs))

    @cached_property
    def inside(self) -> float:
        """Of the work, seconds of communication inside layers."""
        pairs = zip(self.costs, self.again, strict=True)
        return float(sum(each.inside_forward * (1 + twice) + each.inside_backward for each, twice in pairs))

    @cached_property
    def sent(self) -> float:
        """Bytes that a rank with all layers sends inside them, for a micro-batch."""
        pairs = zip(self.costs, self.again, strict=True)
        return float(sum(each.sent_forward * (1 + twice) + each.sent_backward for each, twice in pairs))

    @cached_property
    def kept(self) -> np.ndarray:
        """float64[layers]: bytes that a forward of each layer leaves for its backward."""
        kept = np.array([float(each.saved) for each in self.costs])
        kept[self.again] = 0.0
        for segment in self.segments:
            if segment.recomputed and segment.layers.start > 0:
                kept[segment.layers.start] = self.costs[segment.layers.start - 1].output
        return kept

    @cached_property
    def all_kept(self) -> float:
        return float(self.kept.sum())

    @cached_property
    def elements(self) -> np.ndarray:
        """float64[layers]: parameters of each layer; what is tied counts wherever it is."""
        return np.array([float(each.parameters) for each in self.costs])

    @cached_property
    def own_elements(self) -> float:
        """Parameters of the whole model on a rank that has all layers."""
        return float(sum(each.parameters - each.tied for each in self.costs))
