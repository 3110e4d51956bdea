"""What a wheel installs: all files of the package, and a command that starts."""

import os
import re
import shutil
import subprocess
import sys
import venv
from configparser import ConfigParser
from pathlib import Path
from zipfile import ZipFile

import numpy
import pytest

from mpi_harness.launch import clean_environment, mpiexec
from spmd_engine.observability.facts import EXTRAS
from support.command_line import ONE_THREAD, QUIET, TEXT, metrics

ROOT = Path(__file__).parents[2]
#: What pip writes for an entry of ``console_scripts``.
SCRIPT = """import sys
from {module} import {function}
if __name__ == "__main__":
    sys.exit({function}())
"""


def started(command, *arguments, **options):
    environment = {**clean_environment(), **ONE_THREAD, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, **options)


@pytest.fixture
def script(tmp_path):
    """The installed command, as setup.cfg names it."""
    metadata = ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    name, _, target = metadata["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    (tmp_path / name).write_text(SCRIPT.format(module=module, function=function))
    return [sys.executable, str(tmp_path / name)]


def test_usage_lines_name_the_command_as_it_was_started(script):
    for command, name in ((script, "spmd-engine"), ([sys.executable, "-m", "spmd_engine"], "python -m spmd_engine")):
        result = started(command, "data", "--help")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(f"Usage: {name} data [OPTIONS]")


def test_a_mistake_ends_the_installed_command_with_one_line_and_code_2(script):
    result = started(script, "data", "inspect", "nothing.tokens")
    assert (result.returncode, result.stderr) == (2, "spmd_engine: nothing.tokens: no such file\n")


def test_extras_that_texts_name_exist():
    metadata = ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    known = {*metadata["options.extras_require"]}
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "spmd_engine").rglob("*.py")]
    named = {name for file in files for name in re.findall(r"spmd_engine\[([\w,]+)\]", file.read_text())}
    named = {each for name in named for each in name.split(",")} | {extra for extra, _ in EXTRAS.values()}
    assert len(named) > 5 and named <= known


# --- a wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since a build leaves files where it works."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(ROOT / "spmd_engine", folder / "source" / "spmd_engine", ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    build = f"import setuptools.build_meta as backend; backend.build_wheel({str(folder)!r})"
    started([sys.executable, "-c", build], cwd=folder / "source", check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_every_file_of_the_package(wheel):
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "spmd_engine").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    assert any(file.endswith(".toml") for file in files)
    assert files == {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.mark.soak
@pytest.mark.skipif(mpiexec() is None, reason="needs an MPI library and its mpiexec")
def test_the_command_of_an_installed_wheel_runs_on_two_ranks(wheel, tmp_path):
    """In an environment of its own, which borrows no more than the packages that the wheel requires."""
    environment, borrowed = tmp_path / "environment", Path(numpy.__file__).parents[1]
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, *install], check=True, timeout=100)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(f"{borrowed}\n")  # the .pth files there, of an editable one, do not count
    command, options = environment / "bin" / "spmd-engine", ["--steps", "1", "--batch-size", "2", *QUIET, *TEXT]

    mine = {"PATH": f"{Path(mpiexec()[0]).parent}:{os.environ['PATH']}", "LD_LIBRARY_PATH": f"{sys.prefix}/lib"}

    def run(*arguments):
        variables = {**clean_environment(), **ONE_THREAD, **mine}
        result = subprocess.run(arguments, capture_output=True, text=True, env=variables, cwd=tmp_path, timeout=100)
        assert result.returncode == 0, result.stderr
        return result.stdout

    where = run(python, "-c", "import spmd_engine; print(spmd_engine.__file__)")
    assert Path(where.strip()).is_relative_to(environment)
    assert run(command, "--help").startswith("Usage: spmd-engine [OPTIONS]")
    run(*mpiexec(), "-n", "2", command, "train", "--run", "mine", *options)
    assert len(metrics(tmp_path / "runs" / "mine")) == 1
    run(command, "plan", "--model", "gpt-nano", "--ranks", "2", "--machine", "a100")  # reads the package's data
    run(command, "launch", "-n", "2", "--", "train", "--run", "launched", *options)
    assert len(metrics(tmp_path / "runs" / "launched")) == 1
