"""A whole array from the rectangles of it that ranks hold, however it is sharded."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.dtypes import describe, described
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.comm.group import Group
from spmd_engine.comm.mesh import Mesh
from spmd_engine.errors import MismatchError, UsageError, one_of
from spmd_engine.sharding.placement import ArrayPlacement, Placement
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.sharding.transfer import TransferPlan, plan_transfer

if TYPE_CHECKING:
    from spmd_engine.engine.base import ShardedEngine

_ARRAY = "array"  # any array's name in a plan, which serves all that are placed alike


@dataclass
class KnownPlacement:
    """What ranks hold of an engine's arrays, asked for once, and the transfers that it was used for."""

    mesh: Mesh
    placement: Placement
    plans: dict[Hashable, TransferPlan] = field(default_factory=dict)

    def fits(self, mesh: Mesh, name: str, part: Array | None) -> bool:
        """Whether this rank still holds ``part`` where it said it does."""
        held = self.placement[name].held[mesh.index(None)] if name in self.placement else ()
        return mesh is self.mesh and [each.shape for each in held] == ([] if part is None else [part.shape])

    def plan(self, name: str, dtype: np.dtype, root: int | None) -> TransferPlan:
        """The transfer to the whole array on every rank, or on ``root``."""
        key = name, dtype, root
        if key not in self.plans:
            source = replace(self.placement[name], dtype=dtype)
            try:
                self.plans[key] = _plan_to_whole(source, root, tuple(self.mesh.nodes_by_rank))
            except UsageError as error:
                raise UsageError(f"{name}: {str(error).removeprefix(f'{_ARRAY}: ')}") from None
        return self.plans[key]


@lru_cache(maxsize=64)
def _plan_to_whole(source: ArrayPlacement, root: int | None, nodes: tuple[str, ...]) -> TransferPlan:
    """Layers of a kind are placed alike, and what ranks update often lies where it is stored: one plan does for all."""
    ranks, whole = len(source.held), (Rectangle.whole(source.shape),)
    held = [whole if root in (None, rank) else () for rank in range(ranks)]
    target = ArrayPlacement.of_rectangles(source.shape, source.dtype, held)
    return plan_transfer(Placement({_ARRAY: source}), Placement({_ARRAY: target}), nodes=nodes)


def assemble(
    engine: ShardedEngine, name: str, part: Array | None, owned: bool, root: int | None = None
) -> Array | None:
    """The whole of which this rank holds ``part`` (None: nothing), on every rank or on ``root``; None elsewhere.

    Where the parts lie, and whether they are those that ranks update (``owned``) or those they store, the engine's
    ``placement`` says; it is asked for once, for all names together. Collective over the world: one agreement, and
    as many rounds as the size of the array needs. Raises UsageError if no rank holds some of it, MismatchError if
    ranks ask for different names.
    """
    if name not in engine.names and name not in engine.buffer_names:
        raise UsageError(f"no parameter {name!r}; {one_of(name, (*engine.names, *engine.buffer_names))}")
    known: dict[bool, KnownPlacement] = vars(engine).setdefault("_known_placements", {})
    fits = owned in known and known[owned].fits(engine.mesh, name, part)
    what = f"{name!r}, {'as updated' if owned else 'as stored'}, {'everywhere' if root is None else f'on rank {root}'}"
    all_fit, dtype = _agree(engine.group(), what, fits, part)
    if not all_fit:
        known[owned] = KnownPlacement(engine.mesh, engine.placement(owned))
    if name not in known[owned].placement:
        raise UsageError(f"no rank holds any of {name!r}")
    plan = known[owned].plan(name, dtype, root)
    blocks = {_ARRAY: [part] if plan.source[_ARRAY].held[engine.group().rank] else []}
    found = plan.execute(engine.group(), blocks, like=engine.backend, label="gather")[_ARRAY]
    return found[0] if found else None


def _agree(world: Group, what: str, fits: bool, part: Array | None) -> tuple[bool, np.dtype]:
    """Whether what is known fits on all ranks, and the array's dtype, which those without a part cannot know.

    Before anything else, and over the world, so that any rank's mistake meets the others. One all_gather.
    """
    ranks = gather_json(world, [what, fits, None if part is None else describe(part.dtype)], "gather")
    asked = [each for each, _, _ in ranks]
    others = [rank for rank, each in enumerate(asked) if each != asked[0]]
    if others:
        raise MismatchError(
            f"gather: ranks {others} ask for another parameter than rank 0, or otherwise: rank 0 for {asked[0]}; "
            f"rank {others[0]} for {asked[others[0]]}"
        )
    dtypes = sorted({dtype for _, _, dtype in ranks if dtype is not None})
    if len(dtypes) > 1:
        raise MismatchError(f"gather: ranks hold {what}, in several dtypes: {', '.join(dtypes)}")
    return all(fits for _, fits, _ in ranks), described(dtypes[0]) if dtypes else np.dtype(np.float32)
