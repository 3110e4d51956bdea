"""What storing parameters in parts costs each layer: seconds in which parameters are gathered and gradients summed.

The engine communicates by parameter groups. Under ZeRO-3 the first group of a layer is gathered while the layer before
it computes (``engine.unsharder``), the others when the layer begins, and then nothing hides them; of a repeated
segment all groups are gathered at its beginning. From ZeRO-2 on gradients travel in every micro-batch, at most
``IN_FLIGHT`` groups at a time (``engine.reducer``): what is more is waited for. A rank's link serves one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spmd_engine.engine.zero.reducer import IN_FLIGHT
from spmd_engine.planning.search.layer_costs import ShardedLayers
from spmd_engine.planning.simulator.collective_time import CollectiveTimes

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
    def of(cls, layers: ShardedLayers, collectives: CollectiveTimes, ranks: Sequence[int], itemsize: int) -> Travel:
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

    def backward(self, work: np.ndarray, layers: ShardedLayers, zero: int) -> np.ndarray:
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


# --- A model's layers divided among a pipeline's stages, and sums over these: what an estimate asks of every stage


class StageSums:
    """Chunk k, from layer ``starts[k]`` on, is on stage k % ``stages``. All that is found is float64[stages]."""

    def __init__(self, layers: ShardedLayers, starts: Sequence[int], stages: int) -> None:
        self.layers, self.starts, self.stages = layers, np.asarray(starts), stages
        self.edges = np.array([*starts, len(layers)])

    def by_chunk(self, of_layer: np.ndarray) -> np.ndarray:
        """Sums over each chunk's layers: float64[chunks]."""
        return np.add.reduceat(of_layer, self.starts)

    def by_stage(self, of_chunk: np.ndarray) -> np.ndarray:
        """Sums over each stage's chunks."""
        return of_chunk.reshape(-1, self.stages).sum(axis=0)

    def worst_chunk(self, of_chunk: np.ndarray) -> np.ndarray:
        """The largest of each stage's chunks."""
        return of_chunk.reshape(-1, self.stages).max(axis=0)

    @cached_property
    def counts(self) -> np.ndarray:
        """Layers."""
        return self.by_stage(np.diff(self.edges))

    @cached_property
    def kept(self) -> np.ndarray:
        """Bytes of activations that a micro-batch leaves in each chunk: float64[chunks]."""
        return self.by_chunk(self.layers.kept)

    @cached_property
    def running(self) -> np.ndarray:
        """Bytes held at most while a layer runs backward, beyond what the stage keeps of micro-batches."""
        most = np.maximum.reduceat(self.layers.running, self.starts)
        return self.worst_chunk(most - self.layers.kept_before[self.starts] - self.kept)

    @cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        """Of every layer that another's parameters are tied to: it, its stage, and the other's stage."""
        chunks = {layer: int(np.searchsorted(self.starts, layer, side="right")) - 1 for layer in self._tied_or_owner}
        stage = {layer: chunk % self.stages for layer, chunk in chunks.items()}
        return [(layer, stage[layer], stage[owner]) for layer, owner in self.layers.owners.items()]

    @property
    def _tied_or_owner(self) -> set[int]:
        return {*self.layers.owners, *self.layers.owners.values()}

    @cached_property
    def elements(self) -> np.ndarray:
        """Parameters on a rank: what is tied counts once on each stage."""
        found = self.by_stage(self.by_chunk(self.layers.elements))
        for layer, here, there in self._places:
            if here == there:
                found[here] -= self.layers.costs[layer].tied
        return found

    @cached_property
    def tied(self) -> np.ndarray:
        """Of these, parameters that another layer has, on whichever stage."""
        return self._of_tied(lambda here, there: True)

    @cached_property
    def apart(self) -> np.ndarray:
        """Of these, parameters that a layer on another stage has."""
        return self._of_tied(lambda here, there: here != there)

    def _of_tied(self, counts) -> np.ndarray:
        found = np.zeros(self.stages)
        for layer, here, there in self._places:
            if counts(here, there):
                found[here] += self.layers.costs[layer].tied
        return found

    def travel(self, travel: Travel) -> list[np.ndarray]:
        """Seconds of all parameter groups, each once, by ``OPERATIONS``."""
        found = []
        for name in OPERATIONS:
            seconds = self.by_stage(self.by_chunk(travel.own[name]))
            for layer, here, there in self._places:
                if here != there:
                    seconds[here] += travel.tied[name][layer]
            found.append(seconds)
        return found

    @cached_property
    def gathered(self) -> np.ndarray:
        """Elements at the most of what ZeRO-3 has gathered: a layer, and a group of the one that comes next."""
        first = self.layers.first_group
        before, after = np.roll(first, 1), np.roll(first, -1)
        before[self.starts] = after[self.edges[1:] - 1] = 0  # of other chunks
        return self.worst_chunk(np.maximum.reduceat(self.layers.gathered + np.maximum(before, after), self.starts))

    def whole_gradients(self, micro_batches: int) -> np.ndarray:
        """Elements at the most of whole gradients under ZeRO-2 and 3: a layer's, and those on their way of the one
        that ran backward before it, which may have been the chunk's first with the micro-batch before."""
        leaving = np.roll(self.layers.last_groups, -1)
        leaving[self.edges[1:] - 1] = self.layers.last_groups[self.starts] if micro_batches > 1 else 0
        return self.worst_chunk(np.maximum.reduceat(self.layers.elements + leaving, self.starts))
