"""The load of a model's experts in a step, summarized from its side outputs, and its rebalancing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import log
from typing import Any, Self

import numpy as np

from spmd_engine.engine import LayeredEngine, ParallelConfig
from spmd_engine.sharding import moved, rebalanced
from spmd_engine.training.hooks import Hook
from spmd_engine.training.run import Run, composition_of


@dataclass(frozen=True)
class ExpertLoad:
    """The load of experts in one step, over all layers with experts. A pair is a token and an expert that it chose."""

    pairs: int  #: those of the whole batch, in all layers
    dropped: int  #: pairs without an expert, for lack of capacity
    heaviest: float  #: the most pairs of one expert, divided by the mean of its layer
    where: str  #: the expert with these most pairs, as in "block0/moe expert 3"
    entropy: float  #: entropy of the router's scores: mean over layers, as a share of the maximum

    @classmethod
    def of(cls, side_outputs: Mapping[str, Any] | None) -> Self | None:
        """The load by the side outputs of a step; None if no layer has experts."""
        side_outputs = side_outputs or {}
        loads = _with_suffix(side_outputs, "/load")
        if not loads:
            return None
        ratios = {
            (max(load) * len(load) / max(1, sum(load)), f"{layer} expert {load.index(max(load))}")
            for layer, load in loads.items()
        }
        heaviest, where = max(ratios)
        shares = [
            value / log(len(loads[layer]))
            for layer, value in _with_suffix(side_outputs, "/entropy").items()
            if len(loads[layer]) > 1
        ]
        pairs, dropped = sum(map(sum, loads.values())), sum(_with_suffix(side_outputs, "/dropped").values())
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


def _with_suffix(side_outputs: Mapping[str, Any], end: str) -> dict[str, Any]:
    return {name.removesuffix(end): value for name, value in side_outputs.items() if name.endswith(end)}


# --- Experts that move between steps, by the measured load


logger = logging.getLogger(__name__)


class Rebalancer(Hook):
    """Moves experts between ranks, with their optimizer state, by the load of the last steps: after as many steps as
    ``composition.rebalance_every``, the composition being that of the run's engine.

    All ranks have the same load, and so make the same decision. The results stay equal, to rounding; only the ranks
    that compute them change.
    """

    def __init__(self, composition: ParallelConfig) -> None:
        self._composition = composition
        self._loads: dict[str, np.ndarray] = {}  # by layer
        self._waits = False  # while a live migration copies parameters and state, which must stay where they are
        self.moves = 0  #: experts moved so far

    def during(self, run: Run, steps: int) -> AbstractContextManager[Any]:
        self._run = run
        return nullcontext()

    def notified(self, name: str, *facts: Any) -> None:
        if name in ("migrating", "reshaped", "not_reshaped"):
            self._waits = name == "migrating"
        if name == "reshaped":
            self._composition = composition_of(self._run)
            self._loads.clear()

    def between_steps(self, step: int, requested: bool) -> None:
        """Collective over the mesh when a move is due."""
        engine, every = self._run.engine, self._composition.rebalance_every
        if not every or self._waits or not isinstance(engine, LayeredEngine):
            return
        for name, load in engine.side_outputs.items():
            layer, _, output = name.rpartition("/")
            if output == "load":
                self._loads[layer] = self._loads.get(layer, 0) + load
        if step % every == 0:
            self._move(engine, step)
            self._loads.clear()

    def _move(self, engine: LayeredEngine, step: int) -> None:
        layout = engine.layout
        parts = engine.mesh.axis_size(layout.axes("e"))
        before = {layer: layout.parts(layer, "e", len(load), engine.mesh) for layer, load in self._loads.items()}
        after = {layer: rebalanced(before[layer], load.tolist(), parts) for layer, load in self._loads.items()}
        moves = sum(len(moved(before[layer], after[layer])) for layer in after)
        if moves:
            layout = replace(layout, experts={**layout.experts, **after})
            how = self._composition.how_on(engine.mesh.axes)
            engine.reshard(engine.mesh, layout, optimizer=self._run.trainer.optimizer, **how)
            self.moves += moves
            logger.info("step %d: %d experts moved to parts with less load", step, moves)
