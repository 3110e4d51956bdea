"""The single device to compare with: a mesh of one rank and, of an engine of one's own, another on that mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter, signature
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import key_of, normal
from spmd_engine.comm.agreement import on_rank_zero
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.threads import run, solo
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.errors import MeshError, UsageError

DEVIATION = 0.1  # of the values that take the place of zeros


def mesh_of_one(axes: Iterable[str] = ("data",)) -> Mesh:
    """A mesh of this rank alone, on which each of the axes has size 1."""
    return Mesh(solo(), **dict.fromkeys(axes, 1))


def engine_and_reference(make: Callable[..., Any], mesh: Mesh) -> tuple[ShardedEngine, ShardedEngine | None]:
    """An engine of one's own on all ranks and, on rank 0, the same on one rank, with the first one's parameters.

    ``make``, a class or a function, is called with ``mesh`` and with ``dtype=float64`` if it takes arguments of these
    names, and with nothing else. An engine without a mesh of its own gets this one; the reference's has the same
    axes. What is wrong on one rank, too, is not found by comparing with it. Collective. Raises UsageError if ``make``
    wants more, or makes no ShardedEngine.
    """
    engine = _made(make, mesh)

    def alone() -> ShardedEngine:
        one = mesh_of_one(engine.mesh.axes)
        try:  # a mesh that it makes itself is then one of one rank, too
            return run(_made, 1, args=(make, one))[0]
        except MeshError as error:
            raise UsageError(
                f"on one rank, {_name(make)} cannot be made: {error}. Let it take the mesh: def __init__(self, mesh)"
            ) from error

    reference = on_rank_zero(engine.group(), alone)
    whole = {name: engine.gather(name, root=0) for name in engine.names}
    if reference is not None:
        _load(reference, whole)
    return engine, reference


def fill_zeros(engine: ShardedEngine, reference: ShardedEngine | None, seed: int) -> None:
    """Give both random values in place of parameters that are all 0, which would hide mistakes. Collective.

    Both load all parameters, as float64: an engine that keeps those of its checkpoint then computes in it.
    """
    world, whole = engine.group(), {}
    for name in engine.names:
        values = None
        if reference is not None:
            gathered = reference.gather(name)
            values = backend_of(gathered).to_host(gathered).astype(np.float64)
            if not values.any():
                values = DEVIATION * normal(key_of(seed, "verify", name), values.shape, np.float64)
        whole[name] = world.broadcast(values, label="verify")
    _load(engine, whole)
    if reference is not None:
        _load(reference, whole)


def _load(engine: ShardedEngine, whole: dict[str, Array]) -> None:
    engine.load_checkpoint(whole)
    engine.after_update()


def _made(make: Callable[..., Any], mesh: Mesh) -> ShardedEngine:
    wanted = signature(make).parameters
    given: dict[str, Any] = {"mesh": mesh, "dtype": np.float64}
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    needs = [n for n, p in wanted.items() if p.kind in kinds and p.default is p.empty and n not in given]
    if needs:
        raise UsageError(
            f"{_name(make)} needs {', '.join(needs)}: give values, as in MODULE:NAME(6, 11), or write a function "
            "that makes the engine"
        )
    made = make(**{name: value for name, value in given.items() if name in wanted})
    if not isinstance(made, ShardedEngine):
        raise UsageError(f"{_name(make)} made a {type(made).__name__}; it must make a ShardedEngine")
    if not made.names:
        raise UsageError(
            f"{_name(make)} made an engine without parameters: load some in its constructor, or name a function that "
            "makes it and loads them"
        )
    if "_mesh" not in made.__dict__:
        made.mesh = mesh
    return made


def _name(make: Callable[..., Any]) -> str:
    return getattr(getattr(make, "func", make), "__name__", str(make))  # of a partial, what it calls
