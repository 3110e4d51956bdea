"""What all tests share: the MPI harness, and property tests that draw the same examples on every rank."""

from hypothesis import settings

pytest_plugins = ["mpi_harness.plugin"]

# Ranks that drew different examples would call different collectives; and a busy machine is no failure.
settings.register_profile("spmd", derandomize=True, deadline=None)
settings.load_profile("spmd")
