"""What all tests share: the MPI harness, property tests that draw the same examples on every rank, Ctrl-C."""

import os
import signal

import pytest
from hypothesis import settings

# Loops that Numba compiles have tests of their own; everything else is held to the NumPy text that they stand for.
os.environ["SPMD_FAST"] = "0"

pytest_plugins = ["mpi_harness.plugin"]

# Ranks that drew different examples would call different collectives; and a busy machine is no failure.
settings.register_profile("spmd", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("spmd")


@pytest.fixture
def sigint_is_heard():
    """Here and in what is started here: a job in the background starts with SIGINT ignored, and so does its Python."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
