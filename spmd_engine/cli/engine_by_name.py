"""An engine of a user's own, by the name that a command line has for it."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.errors import UsageError


def engine_by_name(name: str, option: str) -> Callable[..., Any]:
    """What ``MODULE:NAME`` or ``MODULE:NAME(6, hidden=11)`` is, with the values it is to be called with.

    MODULE is as in import, the current folder included, or the path of a Python file, whose folder is then included.
    Raises UsageError, naming the ``option``, if there is no such thing or the values are more than plain numbers, texts
    and their like.
    """
    module, colon, call = name.partition(":")
    attribute, parenthesis, _ = call.partition("(")
    if not (module and colon and attribute):
        raise UsageError(f"{option} {name}: write MODULE:NAME or FILE.py:NAME")
    arguments, keywords = [], {}
    try:
        if parenthesis:
            parsed = ast.parse(call.strip(), mode="eval").body
            arguments = [ast.literal_eval(each) for each in parsed.args]
            keywords = {each.arg: ast.literal_eval(each.value) for each in parsed.keywords}
        return partial(getattr(_imported(module), attribute), *arguments, **keywords)
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError) as error:
        raise UsageError(f"{option} {name}: {error}") from error


def _imported(module: str) -> ModuleType:
    """A module by name or by its file's path, from which it may import what lies in the same folder."""
    folder, _, file = module.rpartition("/")
    if file.endswith(".py"):
        path = Path(module).resolve()
        if not path.is_file():
            raise ImportError(f"there is no file {module}")
        folder, module = str(path.parent), path.stem
    elif folder:
        raise ImportError(f"{module} is no module; of a file, write the path with its ending .py")
    if (folder := folder or str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    found = importlib.import_module(module)
    if file.endswith(".py") and Path(found.__file__ or "").resolve() != path:
        raise ImportError(f"{path} has the name of another module, {found.__file__}; give the file another name")
    return found


def check_mesh(name: str, engine: ShardedEngine, mesh: Mesh, asked: str | None) -> None:
    """Raise UsageError if ``--mesh`` was ``asked`` for, and the engine has made another one itself."""
    if asked and str(engine.mesh) != str(mesh):
        raise UsageError(
            f"{name} makes a mesh of its own, {engine.mesh}, instead of --mesh {asked}: let it take the mesh, "
            "def __init__(self, mesh), or leave --mesh out"
        )
