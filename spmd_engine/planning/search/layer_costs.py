"""What each layer of a model costs a rank for one micro-batch: what plans are estimated from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from spmd_engine.engine.pipeline.chunk import Recompute, segments
from spmd_engine.engine.zero.reducer import IN_FLIGHT
from spmd_engine.models import Model
from spmd_engine.planning.dry_run.step_analysis import HashedOnce


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
    groups: tuple[int, ...] = ()  #: elements of its parameter groups, in the order in which they are gathered
    tied_groups: tuple[int, ...] = ()  #: of groups that another layer has, too
    host_forward: float = 0.0  #: seconds in which a device's host hands over the forward, while the device works
    host_backward: float = 0.0

    @property
    def all_forward(self) -> float:
        return self.forward + self.inside_forward


def between(a: LayerCosts, b: LayerCosts, share: float) -> LayerCosts:
    """On the line from ``a`` to ``b``, at this share of the way; beyond them too, but never below 0."""
    values = {}
    for each in fields(LayerCosts):
        low, high = getattr(a, each.name), getattr(b, each.name)
        if isinstance(low, float | int):
            value = max(low + (high - low) * share, 0.0)
            values[each.name] = round(value) if isinstance(low, int) and isinstance(high, int) else value
    return replace(a, **values)


def repeated_layers(model: Model, recompute: str) -> list[range]:
    """The layers of each part of a model that is recomputed."""
    parts = segments(model, range(len(model.layers)), Recompute(recompute))
    return [each.layers for each in parts if each.recomputed]


class ShardedLayers:
    """All layers of a model, cut in one way and with one choice of what is recomputed: arrays float64[layers].

    ``forward``, ``back`` and ``weights`` are seconds of each layer for a micro-batch: of its forward, of what is
    repeated with the input's gradient, of the weights' gradient; ``work`` all of these. ``kept`` are bytes that a
    forward leaves for its backward; ``running`` the most that is held while a layer runs, by the layer and by what was
    kept before it in the same chunk, from ``kept_before`` on; ``elements`` parameters.
    """

    def __init__(self, model: Model, costs: Sequence[LayerCosts], repeated: Sequence[range]) -> None:
        """``repeated``: the layers of each part that is recomputed (``repeated_layers``)."""
        self.costs = costs
        again = np.zeros(len(costs), bool)
        for layers in repeated:
            again[layers.start : layers.stop] = True
        self.later_repeated = [layer for layers in repeated for layer in layers[1:]]
        self.forward = self._of(lambda each: each.all_forward)
        self.forward += self._idle(model, self._of(lambda each: each.host_forward), self.forward)
        inputs, inside = self._of(lambda each: each.backward_input), self._of(lambda each: each.inside_backward)
        self.weights = self._of(lambda each: each.backward_weights)
        work = inputs + inside + self.weights
        idle = self._idle(model, self._of(lambda each: each.host_backward), work)
        self.back = inputs + inside + idle + again * self.forward
        self.work = self.forward + self.back + self.weights
        self.whole = float(self.work.sum())
        #: of a micro-batch's way forth and back: without the weights' gradients, and what is repeated
        self.way = float(self.forward.sum() + inputs.sum())
        #: of the work, seconds of communication inside layers; and bytes that a rank with all layers sends there
        self.inside = float((self._of(lambda each: each.inside_forward) * (1 + again) + inside).sum())
        sent = self._of(lambda each: each.sent_forward), self._of(lambda each: each.sent_backward)
        self.sent = float((sent[0] * (1 + again) + sent[1]).sum())
        self.output = self._of(lambda each: each.output)
        saved = self._of(lambda each: each.saved)
        self.kept = np.where(again, 0.0, saved)
        for layers in repeated:
            if layers.start > 0:
                self.kept[layers.start] = costs[layers.start - 1].output
        self.all_kept = float(self.kept.sum())
        self.kept_before = np.cumsum(self.kept) - self.kept
        above = self._of(lambda each: max(each.above_forward, each.above_backward))
        self.running = self.kept_before + self.kept + above
        for layers in repeated:
            part = slice(layers.start, layers.stop)
            self.running[part] += np.cumsum(saved[part])
        self.elements = self._of(lambda each: each.parameters)
        self.own_elements = float(self.elements.sum() - self._of(lambda each: each.tied).sum())
        #: elements that are gathered at once for a layer: of its whole segment where that is repeated
        self.gathered = self.elements.copy()
        for layers in repeated:
            part = slice(layers.start, layers.stop)
            self.gathered[part] = self.elements[part].sum()
        #: elements of each layer's group that is gathered first, and of those whose gradients leave last
        self.first_group = self._of(lambda each: max(each.groups[:1], default=0))
        self.last_groups = self._of(lambda each: sum(each.groups[-IN_FLIGHT:]))
        numbers = {name: number for number, (name, _) in enumerate(model.layers)}
        #: layer with a tied parameter -> the layer that has it
        self.owners = {
            numbers[name]: numbers[full.rpartition("/")[0]]
            for name, layer in model.layers
            for full in layer.tied.values()
        }

    def __len__(self) -> int:
        return len(self.costs)

    def _of(self, number: Callable[[LayerCosts], float]) -> np.ndarray:
        """A number of each layer: float64[layers]."""
        different, at = self.different
        return np.array([float(number(each)) for each in different])[at]

    def _idle(self, model: Model, host: np.ndarray, work: np.ndarray) -> np.ndarray:
        """Seconds that a device waits for its host, float64[layers]. While it works on one layer of a block the host
        is ahead with the next: they are compared block by block."""
        if not host.any():
            return np.zeros(len(host))
        blocks = [name.partition("/")[0] for name, _ in model.layers]
        number = np.cumsum([block != before for block, before in zip(blocks, ["", *blocks], strict=False)])
        hosts = np.bincount(number, host)
        idle = np.maximum(hosts - np.bincount(number, work), 0.0) / np.maximum(hosts, 1e-30)
        return idle[number] * host

    @cached_property
    def groups(self) -> HashedOnce:
        """All that sending parameters and gradients depends on: the layers' parameter groups."""
        different, at = self.different
        return HashedOnce((tuple((each.groups, each.tied_groups) for each in different), tuple(at)))

    @cached_property
    def different(self) -> tuple[list[LayerCosts], list[int]]:
        """The costs that differ, and for each layer which of them are its own: most layers of a model are alike."""
        numbers: dict[int, int] = {}
        at = [numbers.setdefault(id(each), len(numbers)) for each in self.costs]
        return [self.costs[at.index(number)] for number in range(len(numbers))], at
