"""Programs of scripts/, as modules. The folder is not on the path: some of its files have the names of tests."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "scripts"


def script(name):
    """The module of ``scripts/NAME.py``."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up here
    spec.loader.exec_module(module)
    return module
