"""Lazy and fast imports: all ranks import the package when they start."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def imported_when_asked(package: str, public: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562) for names in its modules; ``public`` lists the names by module."""
    modules = {name: module for module, names in public.items() for name in names}

    def get(name: str) -> Any:
        if name not in modules and name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{modules.get(name, name)}")
        value = getattr(module, name) if name in modules else module
        setattr(sys.modules[package], name, value)  # later uses do not call this function
        return value

    return get


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
