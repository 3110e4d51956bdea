"""Programs of scripts/ and examples/, as modules. The folders are not on the path: some files have names of tests."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def script(name, folder="scripts"):
    """The module of ``scripts/NAME.py``, or of a file in another folder."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up here
    spec.loader.exec_module(module)
    return module
