"""The single device to compare with: a mesh of one rank and, of an engine of one's own, another on that mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import key_of, normal
from spmd_engine.comm.agreement import on_rank_zero
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.threads import run, solo
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.user_engine import make_engine, name_of
from spmd_engine.errors import UsageError, WrongNumberOfRanks

DEVIATION = 0.1  #: of the values that take the place of zeros


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
        return run(_made, 1, args=(make, one))[0]  # a mesh that it makes itself is then one of one rank, too

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


@contextmanager
def put_back(engine: ShardedEngine) -> Iterator[None]:
    """Afterwards the engine's attributes are those that it had, and its random generators where they were."""
    generators = np.random.Generator, np.random.RandomState
    before = {name: deepcopy(x) if isinstance(x, generators) else x for name, x in engine.__dict__.items()}
    try:
        yield
    finally:
        engine.__dict__.clear()
        engine.__dict__.update(before)


def _load(engine: ShardedEngine, whole: dict[str, Array]) -> None:
    engine.load_checkpoint({name: array.copy() for name, array in whole.items()})  # it may keep what it is given
    engine.after_update()


def _made(make: Callable[..., Any], mesh: Mesh) -> ShardedEngine:
    try:
        made = make_engine(make, mesh, dtype=np.float64)
    except WrongNumberOfRanks as error:  # of a mesh that it makes itself
        ranks = "one rank, with which verify compares" if mesh.size == 1 else f"{mesh.size} ranks"
        raise UsageError(
            f"on {ranks}, {name_of(make)} cannot be made: it makes the mesh {error.mesh}, of {error.ranks} ranks. "
            "Let it take the mesh: def __init__(self, mesh). Then start: "
            f"mpiexec -n {error.ranks} python -m spmd_engine verify ... --mesh {error.mesh}"
        ) from error
    if not made.names:
        raise UsageError(
            f"{name_of(make)} made an engine without parameters: load some in its constructor, or name a function that "
            "makes it and loads them"
        )
    return made
