"""``dataclass``, as the standard library's, which takes a tenth of its time to define a class.

That one writes the text of up to six methods for each class and compiles them, a millisecond for one that is frozen: an
eighth of what a rank computed until its first step was done. Here all classes share their methods but ``__init__``, and
this one is compiled for a class's first instance, which many never have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, field, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import Any, dataclass_transform


@dataclass_transform(field_specifiers=(field,))
def dataclass(cls: type | None = None, /, *, frozen: bool = False) -> Any:
    """``@dataclass`` or ``@dataclass(frozen=True)``: what ``dataclasses.dataclass`` makes of a class.

    To ``fields``, ``replace`` and ``asdict`` it is the same; a class of either may be derived from one of the other.
    """
    return _made(cls, frozen) if cls is not None else lambda cls: _made(cls, frozen)


def _made(cls: type, frozen: bool) -> type:
    own = dict(vars(cls))
    _find_fields(cls, frozen)
    compared = [each.name for each in fields(cls) if each.compare]
    methods: dict[str, Any] = {"__init__": _first_init(cls), "__repr__": _repr, **_equality(compared)}
    if not frozen:
        methods["__hash__"] = None
    else:
        methods |= _refusals(cls)
    for name, method in methods.items():
        if own.get(name) is None:  # a class with an __eq__ of its own has the __hash__ None
            setattr(cls, name, method)
    return cls


def _find_fields(cls: type, frozen: bool) -> None:
    """Have the standard library find a class's fields, and write no methods; it does for what it knows as frozen."""
    bases = [vars(base)["__dataclass_params__"] for base in cls.__mro__[1:] if "__dataclass_params__" in vars(base)]
    frozen_bases = [each for each in bases if each.frozen]
    if bases and bool(frozen_bases) != frozen:
        raise TypeError(f"{cls.__qualname__} is {'' if frozen else 'not '}frozen, unlike what it is derived from")
    for each in frozen_bases:
        each.frozen = False
    try:
        dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    finally:
        for each in frozen_bases:
            each.frozen = True
    cls.__dataclass_params__.frozen = frozen


def _first_init(cls: type) -> Callable[..., None]:
    def __init__(self: Any, *given: Any, **named: Any) -> None:
        cls.__init__ = _init_of(cls)  # for the next instances
        cls.__init__(self, *given, **named)

    return __init__


def _init_of(cls: type) -> Callable[..., None]:
    """``def __init__(self, x, y=Y): set(self, "x", x) ...``."""
    names: dict[str, Any] = {"set_": object.__setattr__, "MISSING_": MISSING}
    parameters: dict[bool, list[str]] = {False: [], True: []}  # by whether they are given by name alone
    lines = []
    for each in fields(cls):
        name, default, value = each.name, "", each.name
        if each.default_factory is not MISSING:
            names[f"make_{name}_"] = each.default_factory
            default, value = "=MISSING_", f"make_{name}_() if {name} is MISSING_ else {name}"
        elif each.default is not MISSING:
            names[f"default_{name}_"] = each.default
            default = f"=default_{name}_"
        if each.init:
            parameters[each.kw_only].append(name + default)
            lines.append(f"set_(self, {name!r}, {value})")
        elif each.default_factory is not MISSING:
            lines.append(f"set_(self, {name!r}, make_{name}_())")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    by_name = ["*", *parameters[True]] if parameters[True] else []
    exec(f"def __init__({', '.join(['self', *parameters[False], *by_name])}): {'; '.join(lines) or 'pass'}", names)
    init = names["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _equality(names: list[str]) -> dict[str, Callable]:
    key = attrgetter(*names) if len(names) > 1 else lambda self: tuple(getattr(self, name) for name in names)

    def __eq__(self: Any, other: Any) -> bool:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(key(self))

    return {"__eq__": __eq__, "__hash__": __hash__}


def _refusals(cls: type) -> dict[str, Callable]:
    names = {each.name for each in fields(cls)}

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}
