"""Small test files, and another pytest that runs them with this harness."""

import subprocess
import sys
from pathlib import Path

import pytest

import mpi_harness
from mpi_harness.launch import clean_environment

HEAD = """
import os, signal, time
import pytest
from mpi4py import MPI

world = MPI.COMM_WORLD
two_ranks = pytest.mark.mpi(min_size=2)
"""


@pytest.fixture
def sample(tmp_path):
    """Writes a test file."""

    def write(text, name="test_sample.py"):
        path = tmp_path / name
        path.write_text(HEAD + text)
        return path

    return write


@pytest.fixture
def harness():
    """What makes a pytest in another folder use this harness: its environment and arguments."""
    command = ("-m", "pytest", "--color=no", "-p", "mpi_harness.plugin", "-p", "no:hypothesispytest", "-p", "no:anyio")
    # Ranks that wait in MPI for one that has raised keep their cores busy: not for long.
    return {"PYTHONPATH": str(Path(mpi_harness.__file__).parents[1]), "SPMD_TEST_GRACE": "0.5"}, command


@pytest.fixture
def start_parent(harness, sigint_is_heard):
    """Starts a pytest that has others run its tests."""
    environment, command = harness

    def start(*arguments, **more):
        return subprocess.Popen(
            [sys.executable, *command, *map(str, arguments)],
            env={**clean_environment(), **environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def run_parent(start_parent):
    """Runs it to its end."""

    def run(*arguments, **more):
        with start_parent(*arguments, **more) as process:
            try:
                output, errors = process.communicate(timeout=200)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    return run
