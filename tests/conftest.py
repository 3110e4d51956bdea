"""Configuration of all tests: the MPI harness, property tests with the same examples on every rank, Ctrl-C."""

import os
import signal

import pytest
from hypothesis import settings

# Numba loops have their own tests; all other tests run the NumPy code that these loops replace.
os.environ["SPMD_FAST"] = "0"

pytest_plugins = ["mpi_harness.plugin"]

# Ranks with different examples would call different collectives; a busy machine must not cause failures.
settings.register_profile("spmd", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("spmd")


@pytest.fixture
def sigint_is_heard():
    """Handle SIGINT here and in child processes: a background job, and so its Python, starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
