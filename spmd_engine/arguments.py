"""The arguments of public functions, checked against their annotations before anything is done with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, Signature, isfunction, signature
from math import inf
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from spmd_engine.errors import UsageError, counted, described, is_array, one_of

F = TypeVar("F", bound=Callable[..., Any])
_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", NoneType: "None"}
_PLURALS = {"int": "whole numbers", "float": "numbers", "str": "texts", "Any": "values"}
_NAMES = {"ndarray": "an array", "PathLike": "a path", "Callable": "a function"}
Limits = tuple[float, float]  # the least number, and the first that is too large


def checked(
    limits: Mapping[str, float | Limits] = MappingProxyType({}), optional: Collection[str] = (), **give: str
) -> Callable[[F], F]:
    """A decorator of a function, or of a class for its ``__init__``: a call raises UsageError, which names the
    function, for an argument that it does not have or that lacks, for one that does not fit its annotation, and for a
    number outside of its ``limits``: not finite or below the least, or not below the second. None fits ``optional``
    ones. ``give`` says what to pass, by argument; else the annotation does.
    """
    ranges = {name: limit if isinstance(limit, tuple) else (limit, inf) for name, limit in limits.items()}

    def decorate(of: Any) -> Any:
        function = of.__init__ if isinstance(of, type) else of

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            name = type(args[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
            positional, required, parameters = _parameters(function)
            given = dict(zip(positional, args), **options)
            if len(given) < len(args) + len(options) or not required <= given.keys() <= parameters.keys():
                given = bound(name, function, args, options)
            for argument, value in given.items():
                default, kind, exact = parameters[argument]
                if value is default or kind is Any or value is None and argument in optional:
                    continue
                if type(value) in exact and argument not in ranges:
                    continue  # as most are
                for where, what, advice in _misfits(argument, value, kind, ranges.get(argument)):
                    advice = f"give {give[argument]}" if argument in give else advice
                    raise UsageError(f"{name}: {where} is {_shown(what)}; {advice}")
            return function(*args, **options)

        if function is of:
            return call
        of.__init__ = call
        return of

    return decorate


def bound(
    name: str, function: Any, args: Sequence[Any], options: Mapping[str, Any], like: Callable | None = None
) -> dict[str, Any]:
    """The arguments of a call by parameter. Raises UsageError, which names the function, if it does not accept these
    arguments, which are those of ``like``."""
    if not callable(function):
        raise UsageError(f"{name} is {described(function)}; give a function")
    try:
        of = _signature(function) if isfunction(function) else signature(function)
        return of.bind(*args, **options).arguments
    except TypeError as error:
        names = [argument for argument in signature(function).parameters if like or argument != "self"]
        for unknown in options.keys() - names if not like else ():
            raise UsageError(f"{name} has no argument {unknown!r}; {one_of(unknown, names)}") from None
        called = f", but is called with ({', '.join(signature(like).parameters)})" if like else ""
        raise UsageError(f"{name}: {error}; it takes ({', '.join(names)}){called}") from error


@cache
def _signature(function: Callable) -> Signature:
    return signature(function)


@cache
def _parameters(function: Any) -> tuple[tuple[str, ...], set[str], dict[str, tuple[Any, Any, set[type]]]]:
    """The names of the positional parameters, those of the parameters without a default, and of each the default, the
    type (Any without one, for ``*`` and ``**``, and for a type that only type checkers import), and ``_exact`` of it.
    """
    parameters = _signature(function).parameters
    several = {name for name, one in parameters.items() if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    found = {}
    for name, one in parameters.items():
        kind = one.annotation
        try:
            kind = eval(kind, vars(sys.modules[function.__module__])) if isinstance(kind, str) else kind
        except (NameError, AttributeError):
            kind = Any
        kind = Any if name in several or kind is one.empty else kind
        found[name] = one.default, kind, _exact(kind)
    positional = tuple(name for name, one in parameters.items() if one.kind <= one.POSITIONAL_OR_KEYWORD)
    return positional, {name for name, (default, *_) in found.items() if default is Parameter.empty} - several, found


@cache
def _exact(kind: Any) -> set[type]:
    """Classes all of whose direct instances fit a type: not floats, since NaN does not."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return {one for member in inner for one in _exact(member)}
    if origin is Annotated:
        return _exact(inner[0])
    return {kind} if isinstance(kind, type) and kind is not float else set()


def _misfits(where: str, value: Any, kind: Any, limits: Limits | None = None) -> Iterator[tuple[str, Any, str]]:
    """What does not fit a type or the limits: a value or an item of it, with its place, and advice, which is that of
    an ``Annotated`` type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        fitting = next((one for one in inner if not any(_misfits(where, value, one))), None)
        if fitting is None:
            names = [name for one in inner if get_origin(one) is Literal for name in get_args(one)]
            yield where, value, one_of(value, names) if names else f"give {_wanted(kind)}"
        elif limits:
            yield from _misfits(where, value, fitting, limits)
    elif origin is Annotated:
        misfits = [(place, item, f"give {inner[1]}") for place, item, _ in _misfits(where, value, inner[0])]
        yield from misfits or (_misfits(where, value, inner[0], limits) if limits else ())
    elif origin is Literal:
        if value not in inner:
            yield where, value, one_of(value, inner)
    elif origin is not None and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        wrong = (str, bytes, Mapping) if issubclass(origin, Sequence) else (str, bytes)
        counts = origin is tuple and ... not in inner
        items = value if isinstance(value, (tuple, list)) else ()
        if not isinstance(value, Iterable) or isinstance(value, wrong) or counts and len(items) != len(inner):
            yield where, value, f"give {_wanted(kind)}"
        elif inner:
            for number, item in enumerate(items):
                of = inner[number if counts else 0]
                if limits or type(item) not in _exact(of):
                    yield from _misfits(f"{where}[{number}]", item, of, limits)
    elif not _fits(value, origin or kind):
        yield where, value, f"give {_wanted(kind)}" + ", not its class" * isinstance(value, type)
    elif limits and kind in (int, float) and not limits[0] <= value < limits[1]:
        finite = "finite, and " if value == inf else ""
        yield where, value, f"it must be {finite}from {limits[0]}" + f" below {limits[1]}" * (limits[1] < inf)
    elif callable(value) and inner and isinstance(inner[0], list) and not _takes(value, inner[0]):
        yield where, value, f"give {_wanted(kind)} of {counted(len(inner[0]), 'argument')}"


def _fits(value: Any, kind: Any) -> bool:
    if kind is bool:
        return not is_array(value) and value in (True, False)
    if kind in (int, float):
        number = hasattr(value, "__index__" if kind is int else "__float__") and not isinstance(value, type)
        is_one = not is_array(value) or (kind is float and value.ndim == 0)
        return number and is_one and bool(value == value)  # NaN is not
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
    if origin is Annotated:
        return inner[1]
    if origin is tuple and ... not in inner:
        return f"({', '.join(map(_wanted, inner))})"
    if origin is not None and issubclass(origin, Iterable):
        name = getattr(inner[0], "__name__", "such")
        return f"a list of {_PLURALS.get(name, f'{name} objects')}"
    name = getattr(kind, "__name__", str(kind))
    return _NAMES.get(name, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")


def _shown(value: Any) -> str:
    if isfunction(value):
        return f"a function of {counted(len(signature(value).parameters), 'argument')}"
    return repr(value)[:80] if isinstance(value, (str, bytes, int, float)) else described(value)
