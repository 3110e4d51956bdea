"""Configurations: frozen dataclasses whose fields say what values they take, readable from and written to JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from spmd_engine.errors import UsageError, one_of


def setting(
    default: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: Iterable[str] | None = None,
) -> Any:
    """A field with a default and the values it takes: numbers from ``least`` to ``most``, or ``below`` a limit, or one
    of ``choices``."""
    takes = {"least": least, "most": most, "below": below, "choices": tuple(choices) if choices else None}
    return field(default=default, metadata={name: value for name, value in takes.items() if value is not None})


_types = cache(get_type_hints)  #: which compiles each annotation, a fifth of a millisecond for a class


@dataclass(frozen=True)
class Configuration:
    """Base of frozen dataclasses that are checked when they are made: each value by its field's type and ``setting``.

    Raises UsageError, in one line that names the field, for a wrong type or a value out of range. A whole number is
    taken for a float; nothing else is converted.
    """

    def __post_init__(self) -> None:
        types = _types(type(self))
        for each in fields(self):
            value = getattr(self, each.name)
            value = _fitting(each.name, value, types[each.name])
            _check_range(each.name, value, each.metadata)
            object.__setattr__(self, each.name, value)

    def changed(self, **values: Any) -> Self:
        """The same with other values of some fields: ``changed(steps=3)``."""
        return replace(self, **values)

    def as_json(self) -> dict[str, Any]:
        """What ``from_json`` reads: all fields by name, nested configurations as objects, mappings as they are."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_json(cls, content: Any, where: str = "", base: Self | None = None) -> Self:
        """The configuration that a JSON object describes; fields that it lacks are as ``base`` has them, or by default.

        Raises UsageError, in one line beginning with ``where`` (a file's name), for unknown fields and values that a
        field cannot have.
        """
        if not isinstance(content, Mapping):
            raise UsageError(f"{where}: it must be an object, {{...}}, not {json.dumps(content)}")
        types = _types(cls)
        known = [each.name for each in fields(cls)]
        if unknown := sorted(set(content) - set(known)):
            raise UsageError(f"{where}: unknown field {unknown[0]!r}; {one_of(unknown[0], known)}")
        values = {}
        for name, value in content.items():
            section = _configuration(types[name])
            if section and value is not None:
                usual = default_of(cls, name)
                value = section.from_json(value, f"{where}: {name}", usual if isinstance(usual, section) else None)
            values[name] = value
        try:
            return replace(base, **values) if base is not None else cls(**values)
        except UsageError as error:
            raise UsageError(f"{where}: {error}" if where else str(error)) from None
        except TypeError:
            missing = [each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING]
            missing = [name for name in missing if name not in content]
            raise UsageError(f"{where}: the field {missing[0]!r} is missing") from None


def default_of(configuration: type[Configuration], name: str) -> Any:
    """The default of a field."""
    return next(each.default for each in fields(configuration) if each.name == name)


def section_of(configuration: Configuration, name: str) -> Configuration:
    """A nested configuration; where there is none, the one that its type has by default."""
    section = getattr(configuration, name)
    if section is None:
        section = _configuration(_types(type(configuration))[name])()
    return section


def _configuration(kind: Any) -> type[Configuration] | None:
    """The class of a field that holds a nested configuration, perhaps an optional one."""
    for each in (kind, *get_args(kind)):
        if is_dataclass(each):
            return each
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Configuration):
        return value.as_json()
    return dict(value) if isinstance(value, Mapping) else value


def _fitting(name: str, value: Any, kind: Any) -> Any:
    """``value`` as a field of type ``kind`` has it."""
    if get_origin(kind) in (Union, UnionType):
        inner = [each for each in get_args(kind) if each is not NoneType]
        return None if value is None else _fitting(name, value, inner[0])
    if get_origin(kind) is not None:  # Mapping[str, int]
        if not isinstance(value, Mapping) or any(type(size) is not int for size in value.values()):
            raise UsageError(f"{name} is {value!r}: it must map names to whole numbers")
        return dict(value)
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, kind) or kind in (int, float) and type(value) is bool:
        said = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise UsageError(f"{name} is {value!r}: it must be {said.get(kind, kind.__name__)}")
    return value


def _check_range(name: str, value: Any, takes: Mapping[str, Any]) -> None:
    if value is None:
        return
    if "choices" in takes and value not in takes["choices"]:
        raise UsageError(f"{name} is {value!r}; {one_of(value, takes['choices'])}")
    if isinstance(value, float) and not isfinite(value):
        raise UsageError(f"{name} is {value}: it must be finite")
    least, most, below = takes.get("least"), takes.get("most"), takes.get("below")
    if least is not None and value < least or most is not None and value > most or below is not None and value >= below:
        limits = [f"from {least}"] if least is not None else []
        limits += [f"to {most}"] if most is not None else []
        limits += [f"below {below}"] if below is not None else []
        raise UsageError(f"{name} is {value}: it must be {' '.join(limits)}")
