"""Moving a model in mid-training: parameters, buffers and optimizer state from one placement to another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.group import Group
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.engine.stored import StoredEngine, ask_placements
from spmd_engine.errors import UsageError
from spmd_engine.sharding.placement import Placement
from spmd_engine.sharding.transfer import TransferPlan, plan_transfer

Arrays = Mapping[str, Array]


class StateMove:
    """What an engine, and its optimizer, have before they are placed anew: made before, ``finish`` is called after.

    Every element travels once to each rank that will hold it and has it not, as ``plan_transfer`` says; in pieces, so
    that beside its old and new blocks no rank holds more than two of them. Both are collective over the mesh before.
    """

    def __init__(self, engine: StoredEngine, optimizer: Optimizer | None = None) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._group, self._nodes = engine.group(), engine.mesh.nodes_by_rank
        self._stored, self._owned = engine.placement(), engine.placement(owned=True)
        self._arrays = {**engine.parameters, **engine.buffers}
        self._state = {}
        if optimizer is not None:
            optimizer.prepare(engine)
            self._state = {kind: engine.named(arrays) for kind, arrays in optimizer.state.items()}

    def finish(self) -> None:
        """Fill the arrays that the engine has now: on another mesh of all ranks, or of some of them, in any order."""
        engine = self._engine
        order = self._numbers_before(engine.group())
        if len(order) < self._group.size:  # those who leave must know, too
            told = ask_placements(self._group, engine)
            stored, owned = told[False], told[True]
        else:
            stored, owned = engine.placement(), engine.placement(owned=True)
            if order != sorted(order):
                alike = owned is stored
                stored = stored.on(order, self._group.size)
                owned = stored if alike else owned.on(order, self._group.size)
        self._fill(stored, owned, {**engine.parameters, **engine.buffers})

    def leave(self) -> None:
        """What ``finish`` is for a rank that is not on the new mesh: others get what they lack of what it has."""
        self._numbers_before(None)
        told = ask_placements(self._group, None)
        self._fill(told[False], told[True], {})

    def _numbers_before(self, after: Group | None) -> list[int]:
        """Of each rank of the group ``after``, which is None for those not in it, its number in the group before.

        Raises UsageError on all, unless that is one group, of ranks of the old one.
        """
        if after is not None and after.comm is self._group.comm:  # on all ranks then
            return list(range(after.size))
        mine = np.array([[after.rank, after.size] if after else [-1, 0]])
        told = self._group.all_gather(mine, label="placement")
        before = np.flatnonzero(told[:, 0] >= 0)
        order = before[np.argsort(told[before, 0], kind="stable")]
        if told[order, 0].tolist() != list(range(told[:, 1].max())):
            raise UsageError(
                "reshard: all ranks that call it go on on one new mesh, of no others, or pass None for it; here "
                f"{len(order)} of {len(told)} are on a mesh of {told[:, 1].max()}, as its {told[order, 0].tolist()}"
            )
        return order.tolist()

    def _fill(self, stored: Placement, owned: Placement, here: Arrays) -> None:
        """Bring to ``here`` what is placed there, and to the optimizer's state what this rank owns now."""
        plan = plan_transfer(self._stored, stored, nodes=self._nodes)
        self._execute(plan, self._arrays, here)
        if self._optimizer is None:
            return
        for kind in self._state:  # all of it comes: no need of zeros
            made = {key: backend_of(x).xp.empty_like(x) for key, x in self._engine.owned.items()} if here else {}
            self._optimizer.state[kind] = made
        if self._owned is not self._stored or owned is not stored:
            plan = plan_transfer(self._owned, owned, nodes=self._nodes)
        for kind, arrays in self._optimizer.state.items():
            self._execute(plan, self._state[kind], self._engine.named(arrays) if here else {})

    def _execute(self, plan: TransferPlan, old: Arrays, new: Arrays) -> None:
        def held(placement: Placement, arrays: Arrays) -> dict[str, list[Array]]:
            return {name: [arrays[name]] if each.held[self._group.rank] else [] for name, each in placement.items()}

        plan.execute(self._group, held(plan.source, old), out=held(plan.target, new), label="reshard")
