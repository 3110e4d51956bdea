"""Pipeline stages with different tensor-parallel sizes compute what one device computes."""

from functools import cache

import numpy as np
import pytest

import tiny
from spmd_engine import Mesh, run_threads
from spmd_engine.axes import parse_axes
from spmd_engine.engine import Recompute, schedules
from spmd_engine.errors import MeshError, UsageError

train_once = cache(lambda **options: tiny.train({"data": 1}, **options)[0])

#: Options that change results.
COMPUTED = {"dropout", "tied", "micro_batches", "layers"}

CASES = {
    "pipe=2,model=1|2": {"dropout": 0.1},
    "pipe=2,model=2|1": {"sequence_parallel": True, "dropout": 0.1, "zero": 1},
    "pipe=3,model=1|2|1": {"layers": 3, "sequence_parallel": True, "recompute": Recompute.BLOCK},
    "pipe=2,model=3|1": {"tied": False, "schedule": schedules.named("interleaved", 2), "micro_batches": 4, "layers": 3},
    "pipe=2,model=2|3": {"sequence_parallel": True, "schedule": schedules.named("zero-bubble"), "micro_batches": 3},
    "data=2,pipe=2,model=1|2": {"zero": 3, "sequence_parallel": True, "dropout": 0.1},
    "pipe=2,data=2,model=2|1": {"zero": 2, "schedule": schedules.named("interleaved", 2), "layers": 3},
    "model=1|2,pipe=2,data=2": {"zero": 1, "group_threshold": 0},
    "context=2,pipe=2,model=1|2": {"sequence_parallel": True, "zigzag": True},
}


@pytest.mark.parametrize("mesh", CASES)
def test_uneven_stages_train_as_one_device_does(mesh):
    options = CASES[mesh]
    found = tiny.train(parse_axes(mesh), **options)
    tiny.assert_same_training(found, train_once(**{k: v for k, v in options.items() if k in COMPUTED}))
