"""Configurations: frozen dataclasses whose fields describe their values, readable from and written to JSON.

A field's ``setting`` is the only place where its default, range, choices, unit, help and option name are written: the
command line, JSON, ``--help`` and the tables of ``docs/configuration.md`` are generated from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Self, Union, get_args, get_origin

from spmd_engine.errors import UsageError, one_of
from spmd_engine.units import BYTES, SECONDS, bytes_of, exact_bytes, seconds_of


def setting(
    default: Any,
    *,
    help: str = "",
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: Iterable[str] | None = None,
    unit: str | None = None,
    read: Callable[[str], Any] | None = None,
    unset: str | None = None,
    option: str | None = "",
    old_names: tuple[str, ...] = (),
    metavar: str | None = None,
    prefix: str | None = None,
    fixed: bool = False,
    common: bool = False,
    of_images: Any = None,
) -> Any:
    """A field with its default, its allowed values, and its option on the command line.

    Numbers range from ``least`` to ``most``, or lie ``below`` a limit; texts are one of ``choices``. With a ``unit``,
    BYTES or SECONDS, a text such as "2GiB" is also a value; ``read`` converts any other text. ``unset`` describes the
    meaning of None and of an omitted option.

    ``option`` is the name on the command line and among the keywords of ``with_options``, by default the field's name;
    with None, the command line lacks the field. Both, and JSON, also accept ``old_names``, which no table lists. Each
    field of a nested configuration is an option with ``prefix`` before its name, unless the nested configuration's
    ``option`` is None. A ``fixed`` field cannot change when a run resumes. A ``common`` one is on the first page of
    help, ``--help``; ``--help-all`` lists all. ``of_images`` is the default for image models.
    """
    arguments = locals()
    about = {name: arguments[name] for name in arguments if name != "default" and arguments[name] not in (None, "", ())}
    if choices is not None:
        about["choices"] = tuple(choices)
    return field(default=default, metadata=about if option is not None else about | {"option": None})


@cache
def _types(configuration: type) -> dict[str, Any]:
    """The types of a configuration's fields. ``get_type_hints`` would compile equal annotations repeatedly."""
    annotations = [
        (name, _type(annotation, base.__module__) if isinstance(annotation, str) else annotation)
        for base in reversed(configuration.__mro__)
        for name, annotation in vars(base).get("__annotations__", {}).items()
    ]
    return dict(annotations)


@cache
def _type(annotation: str, module: str) -> Any:
    return eval(annotation, vars(sys.modules[module]))


@dataclass(frozen=True)
class Configuration:
    """Base of frozen dataclasses that check each value against its field's type and ``setting`` when created.

    Raises UsageError, in one line that names the field, for a wrong type or a value out of range. It converts whole
    numbers to floats, and texts by the field's ``setting``, but nothing else.
    """

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)  # most are the defaults
            checked = _checked_default(type(self), f) if value is f.default else _checked(type(self), f, value)
            object.__setattr__(self, f.name, checked)

    def changed(self, **values: Any) -> Self:
        """A copy with these values of some fields: ``changed(steps=3)``."""
        try:
            return replace(self, **values)
        except TypeError:
            names = [f.name for f in fields(self)]
            for name in values.keys() - names:
                raise UsageError(f"{type(self).__name__} has no field {name!r}; {one_of(name, names)}") from None
            raise

    def as_json(self) -> dict[str, Any]:
        """The input of ``from_json``: all fields by name, nested configurations as objects, mappings unchanged."""
        return {f.name: _to_json(getattr(self, f.name)) for f in _fields_in_json(self)}

    @classmethod
    def from_json(cls, content: Any, where: str = "", base: Self | None = None) -> Self:
        """The configuration that a JSON object describes; missing fields come from ``base``, or are the defaults.

        Raises UsageError, in one line that begins with ``where`` (a file's name), for unknown fields and invalid
        values.
        """
        if not isinstance(content, Mapping):
            raise UsageError(f"{where or cls.__name__}: it must be an object, {{...}}, not {json.dumps(content)}")
        types, by_name = _types(cls), {f.name: f for f in _fields_in_json(cls)}
        names = [*by_name]
        renamed = {old: f.name for f in fields(cls) for old in f.metadata.get("old_names", ())}
        content = {renamed.get(name, name): value for name, value in content.items()}
        if unknown := sorted(set(content) - set(names)):
            raise UsageError(f"{where}: unknown field {unknown[0]!r}; {one_of(unknown[0], names)}")
        values = {}
        for name, value in content.items():
            section = _find_configuration_class(types[name])
            if section and value is not None:
                default = next(f.default for f in fields(cls) if f.name == name)
                value = section.from_json(value, f"{where}: {name}", default if isinstance(default, section) else None)
            values[name] = None if _is_unset(by_name[name], value) else value  # files of older versions may have it
        try:
            return replace(base, **values) if base is not None else cls(**values)
        except UsageError as error:
            raise UsageError(f"{where}: {error}" if where else str(error)) from None
        except TypeError:
            missing = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
            missing = [name for name in missing if name not in content]
            raise UsageError(f"{where}: the field {missing[0]!r} is missing") from None


def _is_unset(f: Field, value: Any) -> bool:
    """Whether a value is empty where the default is none, as a shell's variable without a value is."""
    return value == "" and f.default is None and "read" not in f.metadata


def _checked(configuration: type[Configuration], f: Field, value: Any) -> Any:
    """The value that a field gets. Raises UsageError for a wrong type or a value out of range."""
    if _is_unset(f, value):
        raise UsageError(f"{f.name} is empty: give a value, or leave it out")
    value = _convert(f.name, _read(f.name, value, f.metadata), _types(configuration)[f.name])
    _check_range(f.name, value, f.metadata)
    return value


@cache
def _checked_default(configuration: type[Configuration], f: Field) -> Any:
    return _checked(configuration, f, f.default)


def not_in_json(default: Any) -> Any:
    """A field that is neither a setting nor in JSON: no file and no option gives it a value. It stays in copies."""
    return field(default=default, compare=False, repr=False, metadata={"in_json": False})


def _fields_in_json(configuration: Configuration | type[Configuration]) -> list[Field]:
    return [f for f in fields(configuration) if f.metadata.get("in_json", True)]


@dataclass(frozen=True)
class ConfigField:
    """A field of a configuration or of a nested configuration, as an option."""

    name: str  #: with underscores
    path: tuple[str, ...]  #: names of the nested fields, from the outermost to this one
    kind: Any  #: the type of its values other than None
    default: Any
    about: Mapping[str, Any]  #: the arguments of ``setting``

    @property
    def is_option(self) -> bool:
        """Whether the field is an option of the command line."""
        return "help" in self.about and self.about.get("option", "") is not None and not is_dataclass(self.kind)

    def read(self, value: Any) -> Any:
        """The value of a text; any other value unchanged."""
        return _read(self.name, value, self.about)

    def text(self, value: Any) -> str:
        """A value as the command line takes it; for None, the text of ``unset``."""
        if value is None:
            return self.about.get("unset", "")
        if self.about.get("unit") == BYTES:
            return exact_bytes(value)
        if isinstance(value, bool):
            return "on" if value else "off"
        return f"{value:g}s" if self.about.get("unit") == SECONDS else str(value)


@cache
def settings_of(configuration: type[Configuration]) -> dict[str, ConfigField]:
    """The fields of a configuration and of its nested configurations, by option name."""
    return {config_field.name: config_field for config_field in _settings(configuration(), (), "")}


def _settings(defaults: Configuration, path: tuple[str, ...], prefix: str) -> Iterator[ConfigField]:
    types = _types(type(defaults))
    for f in _fields_in_json(defaults):
        about, field_path = f.metadata, (*path, f.name)
        section, kind = _find_configuration_class(types[f.name]), _without_none(types[f.name])
        name = about.get("option") or prefix + f.name
        yield ConfigField(name, field_path, kind, getattr(defaults, f.name), about)
        if section and about.get("option", "") is not None:
            yield from _settings(section_of(defaults, f.name), field_path, about.get("prefix", ""))


def section_of(configuration: Configuration, name: str) -> Configuration:
    """A nested configuration; the default of its type if the field is None."""
    section = getattr(configuration, name)
    if section is None:
        kind = _find_configuration_class(_types(type(configuration))[name])
        assert kind, f"{name} is no section of {type(configuration).__name__}"
        section = kind()
    return section


def _find_configuration_class(kind: Any) -> type[Configuration] | None:
    """The class of a nested configuration, which may be optional; None for any other type."""
    kind = _without_none(kind)
    return kind if isinstance(kind, type) and issubclass(kind, Configuration) else None


def _without_none(kind: Any) -> Any:
    """``int`` for ``int | None``."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (argument for argument in get_args(kind) if argument is not NoneType)
    return kind


def _read(name: str, value: Any, about: Mapping[str, Any]) -> Any:
    """The value of a text in a field with ``unit`` or ``read``; any other value unchanged."""
    if not isinstance(value, str) or not ({"unit", "read"} & about.keys()):
        return value
    if "read" in about:
        return about["read"](value)
    return bytes_of(value, name, least=0) if about["unit"] == BYTES else seconds_of(value, name)


def _to_json(value: Any) -> Any:
    if isinstance(value, Configuration):
        return value.as_json()
    return dict(value) if isinstance(value, Mapping) else value


def _convert(name: str, value: Any, kind: Any) -> Any:
    """``value`` converted to the type ``kind`` of its field. Raises UsageError if it has another type."""
    if value is None and kind != _without_none(kind):
        return None
    kind = _without_none(kind)
    if get_origin(kind) is not None and get_args(kind) != (str, int):
        return value  # the function that reads it checks its items
    if get_origin(kind) is not None:
        if not isinstance(value, Mapping) or any(
            not isinstance(size, int) or isinstance(size, bool) for size in value.values()
        ):
            raise UsageError(f"{name} is {value!r}: it must map names to whole numbers")
        return dict(value)
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, kind) or kind in (int, float) and type(value) is bool:
        raise UsageError(f"{name} is {value!r}: it must be {_KINDS.get(kind, kind.__name__)}")
    if isinstance(value, str) and "\0" in value:  # which the system permits in no path
        raise UsageError(f"{name} is {value!r}: it must have no NUL character")
    return value


_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _check_range(name: str, value: Any, about: Mapping[str, Any]) -> None:
    if value is None:
        return
    if "choices" in about and value not in about["choices"]:
        raise UsageError(f"{name} is {value!r}; {one_of(value, about['choices'])}")
    if isinstance(value, float) and not isfinite(value):
        raise UsageError(f"{name} is {value}: it must be finite")
    least, most, below = about.get("least"), about.get("most"), about.get("below")
    if least is not None and value < least or most is not None and value > most or below is not None and value >= below:
        raise UsageError(f"{name} is {value}: it must be {range_of(about)}")


def range_of(about: Mapping[str, Any]) -> str:
    """The range of a field in words: "from 0 to 3"; empty without limits."""
    limits = {"least": "from", "most": "to", "below": "below"}
    return " ".join(f"{word} {about[limit]}" for limit, word in limits.items() if limit in about)
