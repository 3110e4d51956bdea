"""The examples in docstrings produce the output that they show."""

import doctest
import importlib
from pathlib import Path

import pytest

import spmd_engine

ROOT = Path(spmd_engine.__file__).parent
# Only these modules are imported, because some others need an MPI library.
MODULES = [
    ".".join(("spmd_engine", *path.relative_to(ROOT).with_suffix("").parts))
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert results.attempted > 0 and results.failed == 0


def test_there_are_examples():
    assert MODULES
