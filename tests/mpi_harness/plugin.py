"""The pytest plugin: a parent or a rank under --with-mpi, and `mpi_run` for tests of command lines."""

import gc
import os
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from spmd_engine.runtime.launchers import is_launched, launcher_rank, launcher_size

from .cost import Recorder, Table
from .launch import Job
from .marks import Needs
from .parent import Parent
from .ranks import Ranks
from .serial import Serial
from .worker import GARBAGE


def pytest_addoption(parser):
    group = parser.getgroup("mpi")
    help = "under --with-mpi, run so many jobs at a time: MPI tests beside serial ones (1)"
    group.addoption("--jobs", type=int, default=1, metavar="N", help=help)
    group.addoption("--cost", metavar="FILE", help="with --jobs 2 or more, write what each file costs in CPU seconds")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    plugins = config.pluginmanager
    for plugin in plugins.get_plugins():  # pytest-mpi defines the options; its hooks support only one MPI world
        if type(plugin).__name__ == "MPIPlugin":  # and initialise MPI in the parent
            plugins.unregister(plugin)
    # Without pytest-mpi there are no such options.
    if config.getoption("--with-mpi", False) or config.getoption("--only-mpi", False):
        gc.set_threshold(GARBAGE)
        rank, folder = launcher_rank() if is_launched() else None, os.environ.pop("SPMD_TEST_FOLDER", None)
        folder = folder and Path(folder)
        if rank is not None:
            harness = Ranks(config, rank, folder)
        else:
            harness = Serial(config, folder) if folder else Parent(config)
        plugins.register(harness, "mpi-harness")
        if config.getoption("--cost") and (folder or rank is None):
            shared = Path(os.environ["SPMD_TEST_SHARED"])
            plugins.register(Recorder(shared) if folder else Table(config, shared))


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """Make no items of cases that are deselected anyway: there are thousands, and each rank would make them, too."""
    config, marks = metafunc.config, list(metafunc.definition.iter_markers())
    harness = config.pluginmanager.get_plugin("mpi-harness")
    size = launcher_size() if isinstance(harness, Ranks) else None

    def is_kept(call):
        own = [*call.marks, *marks]
        asked = next((Needs(*mark.args, **mark.kwargs) for mark in own if mark.name == "mpi"), None)
        later = config.getoption("markexpr") == "not soak" and any(mark.name == "soak" for mark in own)
        return not later and (size is None or (asked.met_by(size) if asked else size == 1))

    metafunc._calls[:] = list(filter(is_kept, metafunc._calls)) or metafunc._calls[:1]


def pytest_collection_modifyitems(config, items):
    if not config.pluginmanager.has_plugin("mpi-harness"):
        for item in items:
            if item.get_closest_marker("mpi"):
                item.add_marker(pytest.mark.skip(reason="needs several ranks: python -m pytest --with-mpi"))


@dataclass
class Run:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def mpi_run(pytestconfig):
    """`mpi_run(4, "-m", "spmd_engine", "train")` runs Python on 4 ranks and returns a Run. A run that takes
    longer than `timeout` seconds fails the test; no run continues after its test."""

    def run(ranks, *arguments, timeout=120, env=None, cwd=None):
        # Runs work in any folder, whether or not the package is installed.
        path = os.pathsep.join(filter(None, [str(pytestconfig.rootpath), os.environ.get("PYTHONPATH")]))
        command = [str(argument) for argument in arguments]
        # Files, because a pipe stays open for as long as any process that inherited it.
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            env = {"PYTHONPATH": path, **(env or {})}
            with Job(ranks, command, env=env, cwd=cwd, stdout=stdout, stderr=stderr) as job:
                with suppress(subprocess.TimeoutExpired):
                    job.process.wait(timeout)
                returncode = job.process.poll()
            texts = []
            for file in (stdout, stderr):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        if returncode is None:
            tail = "\n".join("".join(texts).splitlines()[-40:])
            pytest.fail(f"no end after {timeout} s: {ranks} ranks of {' '.join(command)}\n{tail}")
        return Run(returncode, *texts)

    return run
