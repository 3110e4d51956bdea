"""The arguments of public functions, checked against their annotations before anything is done with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, Signature, isfunction, signature
from math import inf
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from spmd_engine.errors import UsageError, counted, described, is_array, one_of

F = TypeVar("F", bound=Callable[..., Any])
_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", NoneType: "None"}
_PLURALS = {"int": "whole numbers", "float": "numbers", "str": "texts", "Any": "values"}
_NAMES = {"ndarray": "an array", "PathLike": "a path"}


def checked(
    least: Mapping[str, float] = MappingProxyType({}), optional: Collection[str] = (), **give: str
) -> Callable[[F], F]:
    """A decorator of a function or an ``__init__``: a call raises UsageError, which names the function, for an argument
    that it does not have or that lacks, for one that does not fit its annotation, and for a number that is not finite
    or below its ``least``. None fits ``optional`` ones. ``give`` says what to pass, by argument; else the annotation
    does.
    """

    def decorate(function: Any) -> Any:
        name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for argument, value, kind in _given(name, function, args, options):
                if value is None and argument in optional:
                    continue
                for where, what, wanted in _misfits(argument, value, kind):
                    raise UsageError(f"{name}: {where} is {_shown(what)}; give {give.get(argument, wanted)}")
                if argument in least and value is not None and not least[argument] <= value < inf:
                    wanted = f"give {give[argument]}" if argument in give else f"it must be from {least[argument]}"
                    raise UsageError(f"{name}: {argument} is {value}; {wanted}")
            return function(*args, **options)

        return call

    return decorate


def _given(name: str, function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The arguments of a call that are not the defaults, each with its type."""
    of = _signature(function)
    try:
        given = of.bind(*args, **options).arguments
    except TypeError as error:
        names = [argument for argument in of.parameters if argument != "self"]
        for unknown in options.keys() - names:
            raise UsageError(f"{name} has no argument {unknown!r}; {one_of(unknown, names)}") from None
        raise UsageError(f"{name}: {error}; its arguments are {', '.join(names)}") from None
    for argument, value in given.items():
        parameter = of.parameters[argument]
        if parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) and value is not parameter.default:
            yield argument, value, _kind(parameter.annotation, function.__module__)


@cache
def _signature(function: Any) -> Signature:
    return signature(function)


@cache
def _kind(annotation: Any, module: str) -> Any:
    """The type that an annotation names; Any without one, and for a type that only type checkers import."""
    try:
        return eval(annotation, vars(sys.modules[module])) if isinstance(annotation, str) else Any
    except (NameError, AttributeError):
        return Any


def _misfits(where: str, value: Any, kind: Any) -> Iterator[tuple[str, Any, str]]:
    """What does not fit a type: a value or an item of it, with its place, and what to give instead."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if all(any(_misfits(where, value, one)) for one in inner):
            yield where, value, _wanted(kind)
    elif origin is not None and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        wrong = (str, bytes, Mapping) if issubclass(origin, Sequence) else (str, bytes)
        if not isinstance(value, Iterable) or isinstance(value, wrong):
            yield where, value, _wanted(kind)
        elif isinstance(value, (tuple, list)) and origin is not tuple and inner:
            for number, item in enumerate(value):
                yield from _misfits(f"{where}[{number}]", item, inner[0])
    elif not _fits(value, origin or kind):
        yield where, value, _wanted(kind) + ", not its class" * isinstance(value, type)
    elif callable(value) and inner and isinstance(inner[0], list) and not _takes(value, inner[0]):
        yield where, value, f"{_wanted(kind)} of {counted(len(inner[0]), 'argument')}"


def _fits(value: Any, kind: Any) -> bool:
    if kind is bool:
        return hasattr(value, "__bool__")
    if kind in (int, float):
        return hasattr(value, "__index__" if kind is int else "__float__") and not is_array(value)
    try:
        return not isinstance(kind, type) or isinstance(value, kind)
    except TypeError:  # a protocol that exists for type checkers only
        return True


def _takes(function: Any, arguments: Sequence[Any]) -> bool:
    """Whether a function can be called with so many arguments; True also if this is unknown."""
    try:
        signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _wanted(kind: Any) -> str:
    """What to give for a type, in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_wanted, inner)))
    if kind in _WORDS:
        return _WORDS[kind]
    if origin is not None and issubclass(origin, Callable):
        return "a function"
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping"
    if origin is not None and issubclass(origin, Iterable):
        name = getattr(inner[0], "__name__", "such")
        return f"a list of {_PLURALS.get(name, f'{name} objects')}"
    name = getattr(kind, "__name__", str(kind))
    return _NAMES.get(name, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")


def _shown(value: Any) -> str:
    if isfunction(value):
        return f"a function of {counted(len(signature(value).parameters), 'argument')}"
    return repr(value)[:80] if isinstance(value, (str, bytes, int, float)) else described(value)
