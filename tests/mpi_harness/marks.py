"""The requirements of a test: `@pytest.mark.mpi(min_size=N, ranks=N, timeout_s=S)`."""

import os
from dataclasses import dataclass
from functools import cache

import pytest


@dataclass(frozen=True, kw_only=True)
class Needs:
    min_size: int = 2
    ranks: int | None = None  # exactly this many; min_size also allows more
    timeout_s: float | None = None

    @property
    def size(self):
        """The number of ranks to launch."""
        return self.ranks or self.min_size

    def met_by(self, size):
        return size == self.ranks if self.ranks else size >= self.min_size


@cache  # several events of each test ask
def needs(item):
    """The Needs of an MPI test, None for a serial one."""
    mark = item.get_closest_marker("mpi")
    if mark is None:
        return None
    try:
        return Needs(*mark.args, **mark.kwargs)
    except TypeError as error:
        raise pytest.UsageError(f"{item.nodeid}: mark mpi: {error}") from None


@cache
def limit_s(item):
    """The limit of each of setup, test and teardown. Serial tests also have pytest-timeout, which ends them earlier."""
    usual, asked = float(os.environ.get("SPMD_TEST_TIMEOUT", 60)), needs(item)
    return (asked.timeout_s or usual) if asked else 10 * usual
