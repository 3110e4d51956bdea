"""Reductions that are missing, doubled or replaced by a mean: faults that verify must name."""

import pytest

from spmd_engine.verification import Cause

HOW = {
    Cause.MISSING_SUM: lambda reduce, x: x,
    Cause.REPEATED_SUM: lambda reduce, x: reduce(reduce(x)),
    Cause.MEAN: lambda reduce, x: reduce(x, "mean"),
}
every_how = pytest.mark.parametrize("cause", HOW, ids=lambda cause: cause.name)
