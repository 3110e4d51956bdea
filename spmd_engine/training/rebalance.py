"""Experts that move between steps to where there is room, by the load that was measured."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np

from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.sharding.experts import moved, rebalanced

logger = logging.getLogger(__name__)


class Rebalancer:
    """Every so many steps, looks at the load of each layer's experts since it last looked, and moves those that
    should be elsewhere, with their optimizer state.

    All ranks know the same load, and so decide alike. What is computed does not change, to rounding: only who does it.
    ``how`` are the options of ``LayeredEngine.reshard`` with which the engine was made.
    """

    def __init__(self, engine: LayeredEngine, optimizer: Optimizer, every: int, **how: Any) -> None:
        self._engine, self._optimizer, self._every, self._how = engine, optimizer, every, how
        self._loads: dict[str, np.ndarray] = {}  # by layer
        self.moves = 0  #: experts, so far

    def after(self, step: int) -> None:
        """To be called after each step, with its number from 1. Collective over the world when it is due."""
        for name, load in self._engine.side_outputs.items():
            layer, _, what = name.rpartition("/")
            if what == "load":
                self._loads[layer] = self._loads.get(layer, 0) + load
        if step % self._every == 0:
            self._move(step)
            self._loads.clear()

    def _move(self, step: int) -> None:
        engine, layout = self._engine, self._engine.layout
        parts = engine.mesh.axis_size(layout.axes("e"))
        before = {layer: layout.parts(layer, "e", len(load), engine.mesh) for layer, load in self._loads.items()}
        after = {layer: rebalanced(before[layer], load.tolist(), parts) for layer, load in self._loads.items()}
        moves = sum(len(moved(before[layer], after[layer])) for layer in after)
        if moves:
            layout = replace(layout, experts={**layout.experts, **after})
            engine.reshard(engine.mesh, layout, optimizer=self._optimizer, **self._how)
            self.moves += moves
            logger.info("step %d: %d experts moved to parts with less load", step, moves)
