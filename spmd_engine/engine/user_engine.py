"""An engine of a user's own, made by a class or a function that may take the mesh."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.errors import UsageError

_NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def make_engine(make: Callable[..., Any], mesh: Mesh, **offered: Any) -> ShardedEngine:
    """What ``make``, a class or a function, makes, on ``mesh`` unless it has made a mesh of its own.

    It is called with ``mesh`` and with what else is ``offered`` if it takes arguments of these names, and with
    nothing else. Raises UsageError if it needs more, or makes no ShardedEngine.
    """
    wanted, offered = signature(make).parameters, {"mesh": mesh, **offered}
    needs = [n for n, p in wanted.items() if p.kind in _NAMED and p.default is p.empty and n not in offered]
    if needs:
        raise UsageError(
            f"{name_of(make)} needs {', '.join(needs)}: give values, as in MODULE:NAME(6, 11), or write a function "
            "that makes the engine"
        )
    made = make(**{name: value for name, value in offered.items() if name in wanted})
    if not isinstance(made, ShardedEngine):
        raise UsageError(f"{name_of(make)} made a {type(made).__name__}; it must make a ShardedEngine")
    if "_mesh" not in made.__dict__:
        made.mesh = mesh
    return made


def name_of(make: Callable[..., Any]) -> str:
    """What people call it; of a partial, what that calls."""
    return getattr(getattr(make, "func", make), "__name__", str(make))
