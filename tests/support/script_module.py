"""Programs of scripts/ and examples/, as modules. The folders are not on the path: some files have names of tests."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).parents[2]


def script(name, folder="scripts"):
    """The module of ``scripts/NAME.py``, or ``scripts/NAME``, or of a file in another folder."""
    path = ROOT / folder / name
    path = path if path.is_file() else path.with_suffix(".py")
    loader = SourceFileLoader(f"script_{name}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up here
    spec.loader.exec_module(module)
    return module
