"""Programs of scripts/, as modules. That folder is on no path: it has files that are called as some of the tests'."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "scripts"


def script(name):
    """The module of ``scripts/NAME.py``."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
