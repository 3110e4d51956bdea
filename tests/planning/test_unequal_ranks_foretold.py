"""What unequal ranks send and hold, as predicted by the dry run."""

from dataclasses import replace

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import LayeredEngine
from spmd_engine.engine.build import composed_layout
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models import gpt
from spmd_engine.observability.memory import bytes_per_rank
from spmd_engine.planning import analyze
from support import tiny
from support.real_steps import ledgers

MODEL = gpt(tiny.SIZE, dropout=0.1)


CASES = [
    ({"data": 2}, ParallelConfig(shares="data=3:1"), 1, [[7], [2]]),
    (
        {"data": 2, "model": 2},
        ParallelConfig(shares="data=2:1", zero=1, state_shares="data=1:3", sequence_parallel=True),
        1,
        [[6], [6], [3], [3]],
    ),
    (
        {"data": 2, "shard": 2},
        ParallelConfig(shares="data=3:1,shard=1:2", state_shares="shard=0:1,data=2:1", zero=3, min_tensor_size=300),
        1,
        [[2], [5], [1], [1]],
    ),
    ({"pipe": 2, "data": 2}, ParallelConfig(shares="data=3:1", zero=2, min_tensor_size=300), 2, [[4, 3], [1, 1]] * 2),
]


@pytest.mark.parametrize("case", CASES[1:3], ids=["zero-1", "zero-3"])
def test_what_unequal_ranks_send_is_foretold(case):
    axes, composition, _, _ = case
    sizes = {"batch_size": 12, "micro_batches": 1, "dtype": np.float32}
    real = ledgers(MODEL, axes, composition, **sizes)
    for alike in analyze(MODEL, axes, composition, **sizes).classes:
        for rank in alike.ranks:
            assert sum(entry[2] for entry in real[rank].values()) == alike.step.bytes_sent


def test_what_unequal_ranks_hold_is_foretold():
    """Seven heads in the ratio 5:2 are 5 and 2; a rank without a share has what nobody shards."""
    axes, composition = {"model": 3}, ParallelConfig(shares="model=5:0:2")
    model = gpt(replace(tiny.SIZE, width=14, heads=7))

    def program():
        with Mesh(**axes) as mesh:
            engine = LayeredEngine(model, mesh, composed_layout(model, mesh, composition), dtype=np.float64)
            heads = engine.parameters["block0/attention/query"].shape[1]
            return heads, sum(array.nbytes for array in engine.parameters.values())

    heads, held = zip(*run_threads(program, 3), strict=True)
    assert heads == (5, 0, 2)
    shown = bytes_per_rank(model, axes, composition, dtype="float64")
    analysis = analyze(model, axes, composition, batch_size=4, dtype=np.float64)
    for rank in range(3):
        assert dict(shown[rank])["parameters"] == analysis.of_rank(rank).before["parameters"] == held[rank]
