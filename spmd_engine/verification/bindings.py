"""Observes, and may replace, the arrays that a user's functions bind to names, return and reduce."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from linecache import getline
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm import Group

#: Code whose names are not observed: Python, NumPy, and this package except the pages of strategies/.
_PACKAGE = Path(__file__).parents[1]
_LIBRARY = str(Path(np.__file__).parent), str(_PACKAGE), "<"
_PAGES = str(_PACKAGE / "strategies")
_PYTHON, _INSTALLED = sysconfig.get_paths()["stdlib"], ("site-packages", "dist-packages")
#: A line that changes the array of a name without binding another array to the name: ``y += b``, ``y[...] = b``.
_CHANGES = re.compile(r"\s*(\w+)(\.\w+)?\s*(\[.*\])?\s*(\+|-|\*|/|@|\*\*)?=(?!=)")


@dataclass(frozen=True, order=True)
class Name:
    """A local variable, an item of one, or a returned value, and the line that bound an array to it."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} {place(self.file, self.line)}"


def place(file: str, line: int) -> str:
    """``(engine.py:12)``."""
    return f"({Path(file).name}:{line})"


@dataclass(frozen=True)
class ObservedReduction:
    """An all_reduce that a user's line makes."""

    file: str
    line: int
    op: str
    axes: tuple[str, ...]


class Bindings:
    """``with Bindings(see): ...`` calls ``see(name, array)`` after each line that binds an array of floats to a name.

    If ``see`` returns another array, the name is bound to that array. Observed names are local variables, arguments,
    items of dictionaries (``g["w"]``), attributes of ``self``, and returned values. ``reduced(reduction, array)`` is
    called with the argument of each all_reduce. All functions called in this thread are observed, except those of
    Python, NumPy and this package. Like debuggers, it uses ``sys.settrace``.
    """

    def __init__(
        self,
        see: Callable[[Name, Array], Array | None],
        reduced: Callable[[ObservedReduction, Array], None] = lambda reduction, array: None,
    ) -> None:
        self._see, self._reduced = see, reduced
        self._before: Any = None

    def __enter__(self) -> Bindings:
        self._before = sys.gettrace()
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enter_function(self, frame: FrameType, event: str, arg: object) -> Callable | None:
        if not _is_user_code(frame.f_code):
            if frame.f_code in (Group.all_reduce.__code__, Group.start_all_reduce.__code__):
                self._see_reduction(frame)
            return None
        file, line = frame.f_code.co_filename, frame.f_lineno
        bound = {label: holder[key] for holder, key, label in _arrays(frame.f_locals) if label.startswith("self.")}

        def after_line(frame: FrameType, event: str, arg: object) -> Callable:
            nonlocal line
            values = frame.f_locals  # assignments to it reach the variables when this function returns
            changed = match[1] if (match := _CHANGES.match(getline(file, line))) else None
            for holder, key, label in list(_arrays(values)):
                array = holder[key]
                if bound.get(label) is not array or changed in (label, label.partition("[")[0]):
                    replacement = self._see(Name(file, line, label if event != "call" else f"argument {label}"), array)
                    if replacement is not None:
                        holder[key] = array = replacement
                    bound[label] = array
            if event == "return":
                self._see_returned(frame.f_code.co_name, file, line, arg)
            line = frame.f_lineno
            return after_line

        return after_line(frame, event, arg)  # for the function's arguments

    def _see_returned(self, function: str, file: str, line: int, returned: Any) -> None:
        first: Any = returned[0] if isinstance(returned, tuple) and returned else returned
        if function.startswith("<"):
            return
        if _is_array_of_floats(first):
            replacement = self._see(Name(file, line, f"what {function} returns"), first)
            if replacement is not None and first.flags.writeable:
                first[...] = replacement
        elif isinstance(returned, dict):
            for key, array in list(returned.items()):
                if _is_array_of_floats(array):
                    replacement = self._see(Name(file, line, f'what {function} returns as "{key}"'), array)
                    returned[key] = array if replacement is None else replacement

    def _see_reduction(self, frame: FrameType) -> None:
        """Report an all_reduce before it begins: the observed line that calls it, and its array."""
        group, caller = frame.f_locals["self"], frame.f_back
        while caller is not None and caller.f_trace is None:
            caller = caller.f_back
        if caller is not None and group.size > 1:
            x, op = frame.f_locals["x"], frame.f_locals["op"]
            axes = tuple(group.axes.split(","))
            self._reduced(ObservedReduction(caller.f_code.co_filename, caller.f_lineno, op, axes), x)


def _arrays(values: dict[str, Any]) -> Iterator[tuple[MutableMapping, str, str]]:
    """Yield the arrays of floats in a function's local variables: the container, the key in it, and a label."""
    for name, value in values.items():
        if _is_array_of_floats(value):
            yield values, name, name
        elif name == "self":
            attributes = getattr(value, "__dict__", {}).items()
            yield from ((vars(value), key, f"self.{key}") for key, x in attributes if _is_array_of_floats(x))
        elif isinstance(value, dict):
            yield from ((value, key, f'{name}["{key}"]') for key, x in value.items() if _is_array_of_floats(x))


def _is_user_code(code: CodeType) -> bool:
    file = code.co_filename
    if file.startswith(_PYTHON):
        return any(folder in file for folder in _INSTALLED)
    return file.startswith(_PAGES) or not file.startswith(_LIBRARY)


def _is_array_of_floats(value: Any) -> bool:
    is_array = all(hasattr(type(value), name) for name in ("dtype", "ndim"))  # an engine has a dtype, too
    return is_array and value.dtype.kind == "f" and value.ndim > 0
