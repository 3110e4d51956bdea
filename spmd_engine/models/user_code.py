"""The user's own models and engines, by name: ``MODULE:NAME``, ``FILE.py:NAME`` or ``FILE.py:NAME(6, hidden=11)``."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_loader
from inspect import signature
from pathlib import Path
from shlex import quote
from types import CodeType, ModuleType
from typing import Any, ClassVar

from spmd_engine.errors import UsageError, one_of
from spmd_engine.foreign import reason
from spmd_engine.models.model import Model

_CODE = re.compile(r"(?P<module>[^:()\0]+):(?P<attribute>[^\W\d]\w*)(?P<call>\(.*\))?", re.DOTALL)


def is_code(name: str) -> bool:
    """Whether a model's name is that of code, and of no file that exists."""
    return _CODE.fullmatch(name) is not None and not os.path.exists(name)


def name_of_code(name: str) -> str:
    """``NAME`` of ``FILE.py:NAME(6)``."""
    return name.partition(":")[2].partition("(")[0]


def with_arguments(name: str, values: Sequence[str]) -> str:
    """``FILE.py:NAME(hidden=11)`` of ``FILE.py:NAME`` and ``["hidden=11"]``; a value that is no literal is a text.

    Raises UsageError for a name that is not that of code, and for values that are not of the form ``name=value``.
    """
    if not is_code(name):
        raise UsageError(f"--set {values[0]}: {name} is no code of your own; --set goes with --model FILE.py:NAME")
    arguments = []
    for text in values:
        argument, equals, value = text.partition("=")
        if not (equals and argument.isidentifier()):
            raise UsageError(f"--set {text}: write --set name=value")
        arguments.append(f"{argument}={_literal(value)!r}")
    target, _, call = name.partition("(")
    return f"{target}({', '.join([*filter(None, [call.rstrip().removesuffix(')').strip()]), *arguments])})"


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def code_named(name: str, option: str = "--model", digest: str | None = None, *, named_in: str) -> Callable[..., Any]:
    """The class or function of this name, with the arguments that the name gives. All own code is imported here.

    ``named_in`` is what named the code, if not the user or a program ("" then): a file never makes code run, whatever
    it says, since it may come from anyone.

    MODULE is a name as in import, also of a file in the current folder, or the path of a Python file, whose folder is
    then on the import path. Raises UsageError, naming the ``option``, for code that a file names, if it cannot be
    imported or ends the program, if an argument is not a literal, and if the file has another ``digest``.
    """
    if named_in:
        raise not_permitted(name, named_in)
    match = _CODE.fullmatch(name)
    if not match:
        raise UsageError(f"{option} {name}: write MODULE:NAME or FILE.py:NAME")
    if digest is not None and digest != digest_of(name, option):
        raise UsageError(
            f"{name}: the file has changed since the job began (its SHA-256 differs); to run what it is now, name the "
            f"code again by --model {name}, or restore the file"
        )
    arguments, keywords = [], {}
    try:
        if match["call"]:
            call = ast.parse(match["attribute"] + match["call"], mode="eval").body
            if not isinstance(call, ast.Call):
                raise SyntaxError("write NAME(ARGUMENTS)")
            arguments = [ast.literal_eval(argument) for argument in call.args]
            keywords = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in call.keywords}
        with _that_must_not_end(f"{option} {name}"):
            module = _imported(match["module"])
        if (make := getattr(module, match["attribute"], None)) is None:
            there = one_of(match["attribute"], names_in(module.__file__ or ""))
            raise AttributeError(f"{match['module']} has no attribute {match['attribute']!r}; {there}")
        if isinstance(make, Model):
            model, make = make, lambda: model
        signature(make).bind_partial(*arguments, **keywords)
        return partial(make, *arguments, **keywords)
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError) as error:
        raise UsageError(f"{option} {shown(name)}: {error}") from error


def names_in(path: str) -> list[str]:
    """The classes, functions and variables that a file of code defines, which is not run; none if it cannot be read."""
    try:
        body = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    named = [part.name for part in body if isinstance(part, (ast.ClassDef, ast.FunctionDef))]
    assigned = [target for part in body if isinstance(part, ast.Assign) for target in part.targets]
    return named + [target.id for target in assigned if isinstance(target, ast.Name)]


def not_permitted(name: str, named_in: str, or_else: str = "") -> UsageError:
    """The error for code that a file names; ``or_else``: what else the user can do than name it."""
    return UsageError(
        f"{named_in} names code, {shown(name)}, and a file never makes code run: to run it, name it yourself by "
        f"--model {quote(shown(name))}{or_else}"
    )


def other_code(name: str, named: str, where: str) -> UsageError:
    """The error for a model, ``named`` by the user, that is not the code ``name`` of what ``where`` says."""
    return UsageError(
        f"the model of {where} is {shown(name)}, not {shown(named)}: name it, with its arguments, by "
        f"--model {quote(shown(name))}"
    )


def shown(name: str) -> str:
    """The name of code as text of one line, which cannot control a terminal."""
    return name if name.isprintable() else repr(name)


@contextmanager
def _that_must_not_end(what: str) -> Iterator[None]:
    """An error of own code that would end the program as if all were done, such as SystemExit, is a UsageError."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UsageError(f"{what}: its code ended the program ({reason(error)}) instead of returning") from error


def _imported(module: str) -> ModuleType:
    """A module by name or by the path of its file; it may import modules of its folder."""
    folder, _, file = module.rpartition("/")
    path = None
    if file.endswith(".py"):
        path = Path(module).resolve()
        if not path.is_file():
            raise ImportError(f"there is no file {module}")
        folder, module = str(path.parent), path.stem
    elif folder:
        raise ImportError(f"{module} is not a module; write the path of a file with its ending .py")
    if (folder := folder or str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    source = path or file_of(module)
    if source and source.name == f"{module}.py":
        _Sources.paths[module] = source
    imported = importlib.import_module(module)
    if path and Path(imported.__file__ or "").resolve() != path:
        raise ImportError(f"{path} has the name of another module, {imported.__file__}; give the file another name")
    return imported


class _Sources:
    """Finds the files whose SHA-256 is recorded and shown. Python would prefer other files that came with one and may
    hold other code: a package or an extension module of its name, or what it takes for the compiled file."""

    paths: ClassVar[dict[str, Path]] = {}  #: by module

    @classmethod
    def find_spec(cls, module: str, folders: Any = None, target: Any = None) -> ModuleSpec | None:
        path = cls.paths.get(module)
        return spec_from_loader(module, _SourceLoader(module, str(path))) if path else None


class _SourceLoader(SourceFileLoader):
    """Compiles the file itself."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


sys.meta_path.insert(0, _Sources)


def digest_of(name: str, option: str = "--model") -> str:
    """The SHA-256 of the file that has the code, which is not run. Raises UsageError if there is no such file."""
    path = file_of(name)
    try:
        return sha256(path.read_bytes()).hexdigest() if path else ""
    except OSError as error:
        module = name.partition(":")[0]
        raise UsageError(f"{option} {name}: {module} cannot be read: {error.strerror}") from error


def file_of(name: str) -> Path | None:
    """The file that has the code of this name; None for a module without a file."""
    module = name.partition(":")[0]
    return Path(module) if module.endswith(".py") else _file_of(module)


def _file_of(module: str) -> Path | None:
    """The file of a module, found without importing its packages; None for one that has no file."""
    folders: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    spec = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, folders)  # by its full name, a package without __init__.py needs its parent
        folders = spec.submodule_search_locations if spec else []
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def call(make: Callable[..., Any], what: str, **offered: Any) -> Any:
    """What ``make``, a class or a function, returns; it is called with what is ``offered`` and it takes, by name.

    Raises UsageError if it needs other arguments; ``what`` is what it should make.
    """
    if lacks := getattr(getattr(make, "func", make), "__abstractmethods__", ()):
        raise UsageError(f"{name_of(make)} lacks {', '.join(sorted(lacks))}: define these methods")
    wanted = signature(make).parameters
    required = {
        name for name, p in wanted.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    if needs := [name for name in wanted if name in required and name not in offered]:
        raise UsageError(
            f"{name_of(make)} needs {', '.join(needs)}: give values, as in MODULE:NAME(6, 11) or --set {needs[0]}=6, "
            f"or write a function that makes {what}"
        )
    with _that_must_not_end(name_of(make)):
        return make(**{name: value for name, value in offered.items() if name in wanted})


def name_of(make: Callable[..., Any]) -> str:
    """The name of a class or a function; that of the function which a partial calls."""
    return getattr(getattr(make, "func", make), "__name__", str(make))


def own_model(name: str, digest: str | None, named_in: str) -> Model:
    """The ``Model`` that the code of this name makes, by ``code_named``; raises UsageError for anything else."""
    make = code_named(name, digest=digest, named_in=named_in)
    model = call(make, "the model")
    if not isinstance(model, Model):
        raise UsageError(
            f"{name} returned a {type(model).__name__}; it must return a Model, which "
            "adds letters and a loss to layers, as in docs/layers.md"
        )
    return model
