"""What a function of a user's binds to names: seen, and changed, while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array

#: Where arrays are made that are nobody's own: NumPy, and this package but for the pages of strategies/.
_PACKAGE = Path(__file__).parents[1]
_LIBRARY = str(Path(np.__file__).parent), str(_PACKAGE)
_PAGES = str(_PACKAGE / "strategies")


@dataclass(frozen=True, order=True)
class Name:
    """A local variable, and the line that bound an array to it."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({Path(self.file).name}:{self.line})"


class Bindings:
    """``with Bindings(see): ...`` calls ``see(name, array)`` after each line that binds an array of floats to a name.

    If that returns another array, the name is bound to it. It sees functions called meanwhile in this thread, also
    those that they call, but for NumPy's and this package's. It uses ``sys.settrace``, as debuggers do.
    """

    def __init__(self, see: Callable[[Name, Array], Array | None]) -> None:
        self._see = see
        self._before: Any = None

    def __enter__(self) -> Bindings:
        self._before = sys.gettrace()
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enter_function(self, frame: FrameType, event: str, arg: object) -> Callable | None:
        if not _is_user_s(frame.f_code):
            return None
        known = dict(frame.f_locals)  # its arguments
        line = frame.f_lineno

        def after_line(frame: FrameType, event: str, arg: object) -> Callable:
            nonlocal line
            values = frame.f_locals  # what is written here reaches the variables when this function returns
            for name, value in list(values.items()):
                if known.get(name) is not value:
                    if _is_array_of_floats(value):
                        other = self._see(Name(frame.f_code.co_filename, line, name), value)
                        if other is not None:
                            values[name] = value = other
                    known[name] = value
            line = frame.f_lineno
            return after_line

        return after_line


def _is_user_s(code: CodeType) -> bool:
    return code.co_filename.startswith(_PAGES) or not code.co_filename.startswith((*_LIBRARY, "<"))


def _is_array_of_floats(value: Any) -> bool:
    return getattr(getattr(value, "dtype", None), "kind", "") == "f" and getattr(value, "ndim", 0) > 0
