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
from spmd_engine.comm.group import Group

#: Code whose names are not observed: Python, NumPy, and this package except the pages of strategies/.
_PACKAGE = Path(__file__).parents[1]
_LIBRARY = str(Path(np.__file__).parent), str(_PACKAGE), "<"
_PAGES = str(_PACKAGE / "strategies")
_PYTHON, _INSTALLED = sysconfig.get_paths()["stdlib"], ("site-packages", "dist-packages")
#: A line that changes what a name holds without binding another array to it: ``y += b``, ``y[...] = b``.
_CHANGES = re.compile(r"\s*(\w+)(\.\w+)?\s*(\[.*\])?\s*(\+|-|\*|/|@|\*\*)?=(?!=)")


@dataclass(frozen=True, order=True)
class Name:
    """A local variable (or an item of one, or what a function returns), and the line that bound an array to it."""

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

    If that returns another array, the name is bound to it. Names are those of local variables and arguments, of items
    of dictionaries (``g["w"]``), of attributes of ``self``, and what functions return. ``reduced(reduction, array)``
    is called with what an all_reduce is given. It sees the functions called meanwhile in this thread, but for
    Python's, NumPy's and this package's. It uses ``sys.settrace``, as debuggers do.
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
        if not _is_user_s(frame.f_code):
            if frame.f_code in (Group.all_reduce.__code__, Group.start_all_reduce.__code__):
                self._see_reduction(frame)
            return None
        file, line = frame.f_code.co_filename, frame.f_lineno
        known = {label: holder[key] for holder, key, label in _places(frame.f_locals) if label.startswith("self.")}

        def after_line(frame: FrameType, event: str, arg: object) -> Callable:
            nonlocal line
            values = frame.f_locals  # what is written here reaches the variables when this function returns
            changed = match[1] if (match := _CHANGES.match(getline(file, line))) else None
            for holder, key, label in list(_places(values)):
                array = holder[key]
                if known.get(label) is not array or changed in (label, label.partition("[")[0]):
                    other = self._see(Name(file, line, label if event != "call" else f"argument {label}"), array)
                    if other is not None:
                        holder[key] = array = other
                    known[label] = array
            if event == "return":
                self._see_returned(frame.f_code.co_name, file, line, arg)
            line = frame.f_lineno
            return after_line

        return after_line(frame, event, arg)  # its arguments

    def _see_returned(self, function: str, file: str, line: int, returned: Any) -> None:
        first: Any = returned[0] if isinstance(returned, tuple) and returned else returned
        if function.startswith("<"):
            return
        if _is_array_of_floats(first):
            other = self._see(Name(file, line, f"what {function} returns"), first)
            if other is not None and first.flags.writeable:
                first[...] = other
        elif isinstance(returned, dict):
            for key, array in list(returned.items()):
                if _is_array_of_floats(array):
                    other = self._see(Name(file, line, f'what {function} returns as "{key}"'), array)
                    returned[key] = array if other is None else other

    def _see_reduction(self, frame: FrameType) -> None:
        """Report an all_reduce that is about to begin, with the observed line that calls it and its array."""
        group, caller = frame.f_locals["self"], frame.f_back
        while caller is not None and caller.f_trace is None:
            caller = caller.f_back
        if caller is not None and group.size > 1:
            x, op = frame.f_locals["x"], frame.f_locals["op"]
            axes = tuple(group.axes.split(","))
            self._reduced(ObservedReduction(caller.f_code.co_filename, caller.f_lineno, op, axes), x)


def _places(values: dict[str, Any]) -> Iterator[tuple[MutableMapping, str, str]]:
    """Where a function's local variables hold arrays of floats: what holds it, by which key, and what it is called."""
    for name, value in values.items():
        if _is_array_of_floats(value):
            yield values, name, name
        elif name == "self":
            yield from ((vars(value), key, f"self.{key}") for key, x in _items(value) if _is_array_of_floats(x))
        elif isinstance(value, dict):
            yield from ((value, key, f'{name}["{key}"]') for key, x in value.items() if _is_array_of_floats(x))


def _items(thing: Any) -> list[tuple[str, Any]]:
    return list(getattr(thing, "__dict__", {}).items())


def _is_user_s(code: CodeType) -> bool:
    file = code.co_filename
    if file.startswith(_PYTHON):
        return any(folder in file for folder in _INSTALLED)
    return file.startswith(_PAGES) or not file.startswith(_LIBRARY)


def _is_array_of_floats(value: Any) -> bool:
    return hasattr(type(value), "dtype") and value.dtype.kind == "f" and value.ndim > 0
