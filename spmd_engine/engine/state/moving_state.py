"""State that moves with an engine to another mesh, beside its parameters: the scalars of a training, a cache of
sequences under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.comm import Group
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.sharding import Rectangle, plan_transfer
from spmd_engine.sharding.placement import Held, Placement, exchange_placements

if TYPE_CHECKING:
    from spmd_engine.engine.layered import LayeredEngine

Parts = Mapping[str, tuple[Rectangle, Array]]  #: parts of whole arrays, by name: one part of an array at most


class MovingState(Protocol):
    """What an engine's user keeps of it, and takes along to another mesh: see ``LayeredEngine.reshard``."""

    def pack(self, engine: LayeredEngine) -> tuple[Any, Parts]:
        """On each rank of the old mesh, before the move: facts that ranks of the new mesh need, as JSON, and this
        rank's parts of arrays."""
        ...

    def unpack(self, engine: LayeredEngine | None, facts: Sequence[Any], whole: Placement) -> Parts:
        """On each rank of both meshes, after the move: continue from the facts that the ranks of the old mesh have
        packed, in rank order, and from the ``whole`` arrays of their parts. Returns new arrays for the parts that this
        rank needs from now on, which are filled then. ``engine`` is None outside the new mesh: a rank needs none there.
        """
        ...


def unpack(
    states: Sequence[MovingState],
    packed: Sequence[tuple[Any, Parts]],
    engine: LayeredEngine | None,
    group: Group,
    backend: Backend,
) -> None:
    """Move states after their engine, by what each rank has ``packed`` of them: None and no parts where the engine was
    not placed. Collective over the ranks of both meshes."""
    for state, (facts, parts) in zip(states, packed, strict=True):
        all_facts = gather_json(group, facts, "placement")
        source = exchange_placements(group, {"": _held(parts)})[""]
        new = state.unpack(engine, [known for known in all_facts if known is not None], source)
        if source:
            target = exchange_placements(group, {"": _held(new)})[""]
            plan = plan_transfer(source, target, nodes=list(group.comm.hosts))
            blocks, out = ({name: [array] for name, (_, array) in one.items()} for one in (parts, new))
            plan.execute(group, blocks, out=out, like=backend, label="reshard")


def _held(parts: Parts) -> Held:
    return {name: (array.dtype, rectangle) for name, (rectangle, array) in parts.items()}
