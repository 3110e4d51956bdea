"""Moving a model in mid-training: parameters, buffers and optimizer state from one placement to another."""

from __future__ import annotations

from collections.abc import Mapping

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.group import Group
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.engine.stored import StoredEngine
from spmd_engine.sharding.placement import Placement
from spmd_engine.sharding.transfer import TransferPlan, plan_transfer

Arrays = Mapping[str, Array]


class StateMove:
    """What an engine, and its optimizer, have before they are placed anew: made before, ``finish`` is called after.

    Every element travels once to each rank that will hold it and has it not, as ``plan_transfer`` says; in pieces, so
    that beside its old and new blocks no rank holds more than two of them. Both are collective over the world.
    """

    def __init__(self, engine: StoredEngine, optimizer: Optimizer | None = None) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._stored, self._owned = engine.placement(), engine.placement(owned=True)
        self._arrays = {**engine.parameters, **engine.buffers}
        self._state = {}
        if optimizer is not None:
            optimizer.prepare(engine)
            self._state = {kind: engine.named(arrays) for kind, arrays in optimizer.state.items()}

    def finish(self) -> None:
        """Fill the arrays that the engine has now."""
        engine, world, nodes = self._engine, self._engine.group(), self._engine.mesh.nodes_by_rank
        stored = plan_transfer(self._stored, engine.placement(), nodes=nodes)
        _execute(stored, world, self._arrays, {**engine.parameters, **engine.buffers})
        if self._optimizer is None:
            return
        for kind in self._state:  # all of it comes: no need of zeros
            made = {key: backend_of(array).xp.empty_like(array) for key, array in engine.owned.items()}
            self._optimizer.state[kind] = made
        owned = plan_transfer(self._owned, engine.placement(owned=True), nodes=nodes)
        for kind, arrays in self._optimizer.state.items():
            _execute(owned, world, self._state[kind], engine.named(arrays))


def _execute(plan: TransferPlan, world: Group, old: Arrays, new: Arrays) -> None:
    def held(placement: Placement, arrays: Arrays) -> dict[str, list[Array]]:
        return {name: [arrays[name]] if each.held[world.rank] else [] for name, each in placement.items()}

    plan.execute(world, held(plan.source, old), out=held(plan.target, new), label="reshard")
