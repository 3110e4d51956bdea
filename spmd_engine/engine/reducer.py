"""Sums gradients over ranks, a group at a time, as soon as the last backward has finished with a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import Pending
from spmd_engine.sharding.groups import ParameterGroup


class Reducer:
    """Starts a group's all_reduce, in place, once every layer that adds to its gradients has done so.

    ``uses`` lists, for each layer, the parameters it adds to (a tied one is in two layers' lists). Layers
    finish in backward order, so reductions run while earlier layers still compute.
    """

    def __init__(self, mesh: Mesh, groups: Sequence[ParameterGroup], uses: Iterable[Iterable[str]]) -> None:
        self._mesh = mesh
        self._group_of = {member.name: group for group in groups for member in group.members}
        self._needed = Counter(self._group_of[name].name for names in uses for name in names)
        self._waiting = Counter(self._needed)
        self._pending: list[Pending] = []

    def begin(self) -> None:
        """Make ready for a step, also after one that an exception broke off."""
        self._pending.clear()
        self._waiting = Counter(self._needed)

    def layer_done(self, names: Iterable[str]) -> None:
        """The last backward of a layer with these parameters is over."""
        for name in names:
            group = self._group_of[name]
            self._waiting[group.name] -= 1
            if self._waiting[group.name] == 0 and group.summed_over:
                door = self._mesh.group(group.summed_over)
                self._pending.append(
                    door.start_all_reduce(group.gradients, out=group.gradients, label="gradients")
                )

    def finish(self) -> None:
        """Wait for all reductions."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
