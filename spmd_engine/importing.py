"""Importing no more than is needed, and no slower than need be: eight ranks that start do it eight times."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from spmd_engine.garbage import uncollected


def imported_when_asked(package: str, public: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A package's ``__getattr__`` (PEP 562), for names that are in modules of its: names by module."""
    modules = {name: module for module, names in public.items() for name in names}

    def get(name: str) -> Any:
        if name not in modules and name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{modules.get(name, name)}")
        found = getattr(module, name) if name in modules else module
        setattr(sys.modules[package], name, found)  # the next time nobody asks
        return found

    return get


@contextmanager
def many_imports() -> Iterator[None]:
    """Meanwhile nobody looks for garbage; afterwards nobody looks for it among what is there.

    Modules, their functions and classes stay. To go through them again and again took a sixth of the time of loading.
    """
    with uncollected():
        try:
            yield
        finally:
            gc.freeze()
