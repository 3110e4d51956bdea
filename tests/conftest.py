"""What all tests share: the MPI harness, and property tests that draw the same examples on every rank."""

import os

from hypothesis import settings

# Loops that Numba compiles have tests of their own; everything else is held to the NumPy text that they stand for.
os.environ["SPMD_FAST"] = "0"

pytest_plugins = ["mpi_harness.plugin"]

# Ranks that drew different examples would call different collectives; and a busy machine is no failure.
settings.register_profile("spmd", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("spmd")
