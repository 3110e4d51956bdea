"""The public names: importable from the package after every module, and all that the documentation imports."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import spmd_engine

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IMPORT = re.compile(r"^\s*from (spmd_engine[\w.]*) import ([\w, ]+)", re.MULTILINE)


def test_public_names_are_what_they_are_after_every_module_is_imported():
    for module in pkgutil.walk_packages(spmd_engine.__path__, "spmd_engine."):
        if not module.name.endswith("__main__") and not module.name.startswith("spmd_engine.arrays.cuda"):
            importlib.import_module(module.name)
    for name in spmd_engine.__all__:
        is_module = name in ("layers", "losses", "optim")
        assert isinstance(getattr(spmd_engine, name), ModuleType) == is_module, name
        assert is_module or callable(getattr(spmd_engine, name)), name


LAZY = ["", ".checkpoints", ".engine", ".layers", ".planning", ".sharding", ".strategies", ".training"]


@pytest.mark.parametrize("package", LAZY)
def test_lazy_names_are_those_that_type_checkers_see(package):
    """A package exports what it imports under TYPE_CHECKING, where its __getattr__ finds the modules of names."""
    module = importlib.import_module(f"spmd_engine{package}")
    for name in module.__all__:
        assert getattr(module, name) is not None
    tree = ast.parse(Path(module.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {alias.name for line in imports for alias in line.names} >= set(module.__all__)


def test_a_package_has_its_modules_as_attributes_and_no_others():
    assert spmd_engine.checkpoints.load_checkpoint is spmd_engine.load_checkpoint
    for name in ("nothing", "typing", "numpy"):
        assert not hasattr(spmd_engine, name), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_imports_reach_no_deeper_than_one_dot(page):
    for module, names in IMPORT.findall(page.read_text()):
        assert module.count(".") <= 1, f"{page.name}: from {module} import {names}"
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.strip()), f"{page.name}: {module} has no {name}"
