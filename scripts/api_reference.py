"""Writes docs/api.md from the docstrings of what ``spmd_engine`` exports: ``python scripts/api_reference.py``."""

from __future__ import annotations

import inspect
from collections import ChainMap
from collections.abc import Iterator
from enum import Enum
from inspect import cleandoc
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import spmd_engine

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# API reference

What `import spmd_engine` exports, from the docstrings (`python scripts/api_reference.py`). Letters in brackets are the
dims of an array, as in `x[b s d]`. [configuration.md](configuration.md) has the fields of `TrainConfig` and
`ParallelConfig`.
"""


def page() -> str:
    """The text of the page."""
    sections = [HEAD]
    for name in spmd_engine.__all__:
        value = getattr(spmd_engine, name)
        if isinstance(value, ModuleType):
            names = getattr(value, "__all__", [n for n, member in vars(value).items() if _is_own(member, value)])
            members = [text for member in names for text in described(member, getattr(value, member), 3)]
            sections += [f"## Module {name}\n", _text(value), *members]
        else:
            sections += described(name, value, 2)
    return "\n".join(sections)


def described(name: str, value: Any, level: int) -> Iterator[str]:
    """The heading, the signature and the docstring of a class, with its methods, or of a function."""
    if not callable(value):
        return
    yield f"{'#' * level} {name}\n"
    yield f"```text\n{name}{_signature(value)}\n```\n"
    yield _text(value)
    if inspect.isclass(value) and level == 2:
        definitions = [base for base in value.__bases__ if base.__name__.endswith("Definition")]
        yield from map(_text, definitions)
        for method, function in ChainMap(vars(value), *map(vars, definitions)).items():
            target = getattr(function, "__func__", getattr(function, "fget", function))
            if not method.startswith("_") and isinstance(target, FunctionType) and target.__doc__:
                signature = "" if isinstance(function, property) else _signature(target)
                yield f"* `{method}{signature}`: {' '.join(_text(target).split())}\n"


def _is_own(member: Any, module: ModuleType) -> bool:
    """Whether a module without ``__all__`` exports this: it is defined there, and not private."""
    defined = getattr(member, "__module__", "") == module.__name__
    return callable(member) and defined and not member.__name__.startswith("_")


def _signature(value: Any) -> str:
    """The signature without the types, which the docstring says in words."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return "(...)"
    parameters = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else Default(p.default))
        for name, p in signature.parameters.items()
        if name != "self"
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


class Default:
    """A default value, printed as one writes it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        value = self.value
        if value is None or isinstance(value, (bool, int, float, str, tuple)):
            return repr(value)
        if isinstance(value, Enum):
            return repr(value.value)
        return value.__name__ if isinstance(value, type) else "..."


def _text(value: Any) -> str:
    return cleandoc(value.__doc__ or "") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
