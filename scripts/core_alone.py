"""Check the core without the tools: a copy of the package without them imports, and passes the core's tests.

    python scripts/core_alone.py            # the tests of one process
    python scripts/core_alone.py --with-mpi --jobs 4

Arguments are those of pytest. The copy is made in a temporary folder, from which Python imports it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: Packages and modules that use the core, and that it must not need.
TOOLS = ("verification", "planning", "adaptive", "serving", "observability", "jobs", "cli", "__main__")

ROOT = Path(__file__).resolve().parent.parent

IMPORT_ALL = """
import importlib, pkgutil, spmd_engine
names = [module.name for module in pkgutil.walk_packages(spmd_engine.__path__, "spmd_engine.")]
for name in names:
    importlib.import_module(name)
print(f"{len(names)} modules of the core import, from {spmd_engine.__path__[0]}")
"""


def copy_core(folder: Path) -> list[str]:
    """Copy the project without the tools to the folder; return the folders of the core's tests."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"), dirs_exist_ok=True)
    for name in TOOLS:
        shutil.rmtree(folder / "spmd_engine" / name, ignore_errors=True)
        (folder / "spmd_engine" / f"{name}.py").unlink(missing_ok=True)
    core = {path.stem for path in (folder / "spmd_engine").iterdir()}
    return sorted(f"tests/{path.name}" for path in (folder / "tests").iterdir() if path.name in core)


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="core_alone-") as name:
        tests = copy_core(Path(name))
        environment = os.environ | {"PYTHONPATH": name}

        def python(*command: str) -> int:
            return subprocess.run([sys.executable, *command], cwd=name, env=environment, check=False).returncode

        return python("-c", IMPORT_ALL) or python("-m", "pytest", "-q", *arguments, *tests)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
