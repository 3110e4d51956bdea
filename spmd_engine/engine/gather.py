"""Gathers a whole array from the rectangles that ranks hold, for every sharding."""

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
from spmd_engine.engine.contract import lack_of_parameters
from spmd_engine.errors import MismatchError, UsageError, one_of
from spmd_engine.sharding.placement import ArrayPlacement, Placement
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.sharding.transfer import TransferPlan, plan_transfer

if TYPE_CHECKING:
    from spmd_engine.engine.base import ShardedEngine

_ARRAY = "array"  # the name in a plan, which all arrays with the same placement share


@dataclass
class KnownPlacement:
    """The placement of an engine's arrays, exchanged once, and the transfer plans made from it."""

    mesh: Mesh
    placement: Placement
    plans: dict[Hashable, TransferPlan] = field(default_factory=dict)

    def fits(self, mesh: Mesh, name: str, part: Array | None) -> bool:
        """Whether this rank still holds ``part`` as the placement describes."""
        held = self.placement[name].held[mesh.index(None)] if name in self.placement else ()
        return mesh is self.mesh and [rectangle.shape for rectangle in held] == ([] if part is None else [part.shape])

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
    """The plan to gather an array on ``root`` or all ranks. Cached, since many layers have the same placements."""
    ranks, rectangles = len(source.held), (Rectangle.whole(source.shape),)
    held = [rectangles if root in (None, rank) else () for rank in range(ranks)]
    target = ArrayPlacement.of_rectangles(source.shape, source.dtype, held)
    return plan_transfer(Placement({_ARRAY: source}), Placement({_ARRAY: target}), nodes=nodes)


def assemble(
    engine: ShardedEngine, name: str, part: Array | None, owned: bool, root: int | None = None
) -> Array | None:
    """The whole array of which this rank holds ``part`` (None: nothing), on every rank or on ``root``; None elsewhere.

    ``owned``: the parts are those that ranks update, else those that they store. The engine's ``placement`` locates
    them, and is exchanged once for all names. Collective over the world: one agreement, and as many rounds as the size
    of the array needs. Raises UsageError if no rank holds some of the array, MismatchError if the calls of ranks
    differ.
    """
    if name not in engine.names and name not in engine.buffer_names:
        names = (*engine.names, *engine.buffer_names)
        raise UsageError(f"no parameter {name!r}; {one_of(name, names) if names else lack_of_parameters(engine)}")
    if root is not None and not 0 <= root < engine.group().size:
        raise UsageError(f"gather of {name!r}: root is {root}, but ranks are 0 to {engine.group().size - 1}")
    part = None if part is None else engine.backend.asarray(part)  # that may be offloaded
    placements: dict[bool, KnownPlacement] = vars(engine).setdefault("_known_placements", {})
    fits = owned in placements and placements[owned].fits(engine.mesh, name, part)
    call = f"{name!r}, {'as updated' if owned else 'as stored'}, {'everywhere' if root is None else f'on rank {root}'}"
    all_fit, dtype = _agree(engine.group(), call, fits, part)
    if not all_fit:
        placements[owned] = KnownPlacement(engine.mesh, engine.placement(owned))
    if name not in placements[owned].placement:
        raise UsageError(f"no rank holds any of {name!r}")
    plan = placements[owned].plan(name, dtype, root)
    blocks = {_ARRAY: [part] if plan.source[_ARRAY].held[engine.group().rank] else []}
    arrays = plan.execute(engine.group(), blocks, like=engine.backend, label="gather")[_ARRAY]
    return arrays[0] if arrays else None


def _agree(world: Group, call: str, fits: bool, part: Array | None) -> tuple[bool, np.dtype]:
    """Whether the known placement fits on all ranks, and the array's dtype, which ranks without a part do not know.

    The first exchange of a gather, over the world, so that a mistake of one rank raises on all. One all_gather.
    """
    ranks = gather_json(world, [call, fits, None if part is None else describe(part.dtype)], "gather")
    calls = [call for call, _, _ in ranks]
    others = [rank for rank, other in enumerate(calls) if other != calls[0]]
    if others:
        raise MismatchError(
            f"gather: ranks {others} make another call than rank 0: rank 0 gathers {calls[0]}; "
            f"rank {others[0]} gathers {calls[others[0]]}"
        )
    dtypes = sorted({dtype for _, _, dtype in ranks if dtype is not None})
    if len(dtypes) > 1:
        raise MismatchError(f"gather: ranks hold {call}, in several dtypes: {', '.join(dtypes)}")
    return all(fits for _, fits, _ in ranks), described(dtypes[0]) if dtypes else np.dtype(np.float32)
