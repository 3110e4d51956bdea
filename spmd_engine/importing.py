"""Lazy and fast imports: all ranks import the package when they start."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from spmd_engine.errors import UsageError, one_of


def library(module: str, needs: str, extra: str) -> Any:
    """A module of an optional library, imported when it is first used.

    Raises UsageError, which begins with what ``needs`` it, if the ``extra`` of this package is not installed.
    """
    try:
        return import_module(module)
    except ImportError:
        raise UsageError(f"{needs}: pip install 'spmd_engine[{extra}]'") from None


def imported_when_asked(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562), which imports a name or a module when it is first used.

    The names, and the modules that have them, are those that the package imports for type checkers, under
    ``if TYPE_CHECKING``.
    """

    def get(name: str) -> Any:
        module = None if name.startswith("__") else _modules_by_name(package).get(name)
        if module is None:
            there = one_of(name, getattr(sys.modules[package], "__all__", ()))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; {there}")
        value = import_module(f"{package}.{name}") if module == package else getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)  # later uses do not call this function
        return value

    return get


@cache
def _modules_by_name(package: str) -> dict[str, str]:
    """The module of each name that the source of a package imports from it; of its modules, the package itself."""
    loader: Any = sys.modules[package].__loader__
    nodes = [node for node in ast.walk(ast.parse(loader.get_source(package))) if isinstance(node, ast.ImportFrom)]
    own = [(node.module, node.names) for node in nodes if node.module and node.module.startswith(package)]
    modules = {module.removeprefix(f"{package}."): package for module, _ in own}
    return modules | {alias.name: module for module, names in own for alias in names}


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the search for reference cycles during work that creates many objects and keeps them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def many_imports() -> Iterator[None]:
    """Pause the search for reference cycles, and exclude all present objects from later searches.

    Modules, functions and classes are permanent. Repeated searches through them took a sixth of the import time.
    """
    with uncollected():
        try:
            yield
        finally:
            gc.freeze()
