"""Frozen dataclasses at a fifth of the price: a rank that starts makes a hundred of them.

``dataclass(frozen=True)`` writes six methods for each class and compiles them one by one, which took two fifths of the
time of loading this package. Here ``__init__`` alone is written; the others need no text of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def immutable(cls: type[T]) -> type[T]:
    """As ``@dataclass(frozen=True)``, for classes all of whose fields can be given to ``__init__``.

    It inherits from no dataclass that was made otherwise, nor such a one from it: ``dataclass`` refuses. So what others
    may inherit from, such as a Schedule, is made by ``dataclass`` itself.
    """
    dataclass(init=False, repr=False, eq=False)(cls)
    compared = [each.name for each in fields(cls) if each.compare]
    values = attrgetter(*compared, *compared[: len(compared) == 1]) if compared else type  # a tuple also of one

    def equal(self: T, other: object) -> bool:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    methods = {
        "__init__": _init(cls),
        "__eq__": equal,
        "__hash__": lambda self: hash(values(self)),
        "__repr__": _repr,
        "__setattr__": _refuse,
        "__delattr__": _refuse,
    }
    for name, method in methods.items():
        if vars(cls).get(name) is None:  # it has none of its own; beside an __eq__ Python says None of __hash__
            setattr(cls, name, method)
    return cls


def _init(cls: type) -> Callable[..., None]:
    """``__init__``, as ``dataclass`` writes it."""
    names: dict[str, Any] = {"_set": object.__setattr__, "_missing": MISSING}
    parameters, lines = ["self"], []
    for each in fields(cls):
        assert each.init and not each.kw_only, f"{cls.__qualname__}.{each.name}"
        name, default, value = each.name, "", each.name
        if each.default is not MISSING:
            names[default := f"_default_{name}"] = each.default
        elif each.default_factory is not MISSING:
            names[make := f"_make_{name}"] = each.default_factory
            default, value = "_missing", f"{make}() if {name} is _missing else {name}"
        parameters.append(f"{name}={default}" if default else name)
        lines.append(f"_set(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n " + ("\n ".join(lines) or "pass"), names)
    init = names["__init__"]
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    init.__annotations__ = {each.name: each.type for each in fields(cls)} | {"return": None}
    return init


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse(self: Any, name: str, *value: Any) -> None:
    raise FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")
