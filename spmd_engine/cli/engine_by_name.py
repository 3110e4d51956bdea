"""An engine of a user's own, by the name that a command line has for it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.errors import UsageError


def engine_by_name(name: str, option: str) -> Callable[..., Any]:
    """What ``MODULE:NAME`` or ``MODULE:NAME(6, hidden=11)`` is, with the values it is to be called with.

    MODULE is as in import, the current folder included. Raises UsageError, naming the ``option``, if there is no such
    thing or the values are more than plain numbers, texts and their like.
    """
    module, colon, call = name.partition(":")
    attribute, parenthesis, _ = call.partition("(")
    if not (module and colon and attribute):
        raise UsageError(f"{option} {name}: write MODULE:NAME")
    arguments, keywords = [], {}
    try:
        if parenthesis:
            parsed = ast.parse(call.strip(), mode="eval").body
            arguments = [ast.literal_eval(each) for each in parsed.args]
            keywords = {each.arg: ast.literal_eval(each.value) for each in parsed.keywords}
        return partial(getattr(importlib.import_module(module), attribute), *arguments, **keywords)
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError) as error:
        raise UsageError(f"{option} {name}: {error}") from error


def check_mesh(name: str, engine: ShardedEngine, mesh: Mesh, asked: str | None) -> None:
    """Raise UsageError if ``--mesh`` was ``asked`` for, and the engine has made another one itself."""
    if asked and str(engine.mesh) != str(mesh):
        raise UsageError(
            f"{name} makes a mesh of its own, {engine.mesh}, instead of --mesh {asked}: let it take the mesh, "
            "def __init__(self, mesh), or leave --mesh out"
        )
