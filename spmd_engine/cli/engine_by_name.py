"""An engine of the user, by its name on the command line."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.errors import UsageError


def engine_by_name(name: str, option: str) -> Callable[..., Any]:
    """The class or function ``MODULE:NAME``, or ``MODULE:NAME(6, hidden=11)`` with these arguments.

    MODULE is a name as in import, also of a file in the current folder, or the path of a Python file; the folder of the
    file is added to the import path. Raises UsageError, naming the ``option``, if it cannot be imported or an argument
    is not a literal.
    """
    module, colon, call = name.partition(":")
    attribute, parenthesis, _ = call.partition("(")
    if not (module and colon and attribute):
        raise UsageError(f"{option} {name}: write MODULE:NAME or FILE.py:NAME")
    arguments, keywords = [], {}
    try:
        if parenthesis:
            parsed = ast.parse(call.strip(), mode="eval").body
            if not isinstance(parsed, ast.Call):
                raise SyntaxError("write NAME(ARGUMENTS)")
            arguments = [ast.literal_eval(argument) for argument in parsed.args]
            keywords = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in parsed.keywords}
        return partial(getattr(_import_module(module), attribute), *arguments, **keywords)
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError) as error:
        raise UsageError(f"{option} {name}: {error}") from error


def _import_module(module: str) -> ModuleType:
    """Import a module by name or by the path of its file; it may import modules of its folder."""
    folder, _, file = module.rpartition("/")
    path = None
    if file.endswith(".py"):
        path = Path(module).resolve()
        if not path.is_file():
            raise ImportError(f"there is no file {module}")
        folder, module = str(path.parent), path.stem
    elif folder:
        raise ImportError(f"{module} is not a module; write the path of a file with its ending .py")
    if (folder := folder or str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    imported = importlib.import_module(module)
    if path and Path(imported.__file__ or "").resolve() != path:
        raise ImportError(f"{path} has the name of another module, {imported.__file__}; give the file another name")
    return imported


def check_mesh(name: str, engine: ShardedEngine, mesh: Mesh, axes: Mapping[str, int] | None) -> None:
    """Raise UsageError if ``--mesh`` has ``axes``, and the engine made another mesh."""
    if axes and str(engine.mesh) != str(mesh):
        raise UsageError(
            f"{name} makes a mesh of its own, {engine.mesh}, instead of --mesh {mesh}: let it take the mesh, "
            "def __init__(self, mesh), or omit --mesh"
        )
