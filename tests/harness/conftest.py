"""Writes small test files, and runs them with this harness in another pytest."""

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

    def write(text, name="test_sample.py", head=HEAD):
        path = tmp_path / name
        path.write_text(head + text)
        return path

    return write


@pytest.fixture
def harness():
    """The environment and arguments with which a pytest in another folder uses this harness."""
    command = ("-m", "pytest", "--color=no", "-p", "mpi_harness.plugin", "-p", "no:hypothesispytest", "-p", "no:anyio")
    # Ranks that wait in MPI for a rank that has raised keep their cores busy, so the wait is short.
    return {"PYTHONPATH": str(Path(mpi_harness.__file__).parents[1]), "SPMD_TEST_GRACE": "0.5"}, command


@pytest.fixture
def start_parent(harness, sigint_is_heard):
    """Starts a parent pytest, whose tests run in other processes."""
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
    """Runs a parent pytest to its end."""

    def run(*arguments, **more):
        with start_parent(*arguments, **more) as process:
            try:
                output, errors = process.communicate(timeout=200)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    return run
