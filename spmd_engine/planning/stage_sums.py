"""A model's layers divided among a pipeline's stages, and sums over these: what an estimate asks of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from spmd_engine.planning.layer_costs import CutLayers
from spmd_engine.planning.travel import OPERATIONS, Travel


class StageSums:
    """Chunk k, from layer ``starts[k]`` on, is on stage k % ``stages``. All that is found is float64[stages]."""

    def __init__(self, layers: CutLayers, starts: Sequence[int], stages: int) -> None:
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
