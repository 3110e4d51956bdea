"""The command line, as in the tests of the commands."""

from cli.conftest import here, ok, one_step, r, several, several_by_mpi, spmd, virtual  # noqa: F401
