"""Unequal ranks: samples by shares of work, state by shares of memory, small tensors whole; one device's numbers."""

from functools import cache
from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.axes import all_positions
from spmd_engine.comm.notation import Spec
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.batch import check_batch
from spmd_engine.engine.build import composed_assignment, composed_layout
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import build_model, gpt
from spmd_engine.training import Trainer
from support import parts, tiny

MODEL = gpt(tiny.SIZE, dropout=0.1)


def trained(axes, composition, micro_batches=1):
    """What ``tiny.train`` gives, and how many samples each rank had."""

    def program():
        with Mesh(**axes) as mesh:
            layout, how = composed_layout(MODEL, mesh, composition), composition.how_on(axes)
            engine = LayeredEngine(MODEL, mesh, layout, dtype=np.float64, seed=5, **how)
            batch = tiny.batch(engine, 0, micro_batches)
            trainer = Trainer(engine, AdamW(), lambda step: batch, lambda step: 0.05, grad_clip=0.3)
            numbers = [[report.loss, report.grad_norm] for report in trainer.run(2)]
            rows = [len(each.samples) for each in batch.micro_batches]
            return numbers, parts.updated(engine, engine.gradients), parts.stored(engine), rows

    return run_threads(program, prod(axes.values()))


@cache
def alone(micro_batches):
    return trained({"data": 1}, ParallelConfig(), micro_batches)[0]


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


@pytest.mark.parametrize(("axes", "composition", "micro_batches", "rows"), CASES)
def test_unequal_ranks_train_as_one_device(axes, composition, micro_batches, rows):
    found = trained(axes, composition, micro_batches)
    assert [each[-1] for each in found] == rows
    tiny.assert_same_training([each[:-1] for each in found], alone(micro_batches))


def owned(composition, axes):
    """Elements of which each rank stores the optimizer's state."""
    found = []
    for place in all_positions(axes):
        groups = composed_assignment(MODEL, place, composed_layout(MODEL, place, composition), 4, composition).groups
        mine = 0
        for group in groups:
            part = group.intervals(place.axis_size(group.summed.sharded))[place.index(group.summed.sharded)]
            mine += part.stop - part.start
        found.append(mine)
    return found


def test_state_goes_by_its_own_shares():
    whole = MODEL.parameter_count
    found = owned(ParallelConfig(zero=1, state_shares="data=1:3"), {"data": 2})
    assert sum(found) == whole and abs(found[0] - whole / 4) <= 3 * tiny.SIZE.width
    assert owned(ParallelConfig(zero=1, state_shares="data=0:1"), {"data": 2}) == [0, whole]


def test_what_is_below_the_least_size_is_in_no_parts():
    axes = {"data": 2}
    place = all_positions(axes)[0]
    composition = ParallelConfig(zero=3, min_tensor_size=300)
    groups = composed_assignment(MODEL, place, composed_layout(MODEL, place, composition), 4, composition).groups
    for group in groups:
        small = {4 * member.size < 300 for member in group.members}
        assert small == {not group.summed.sharded}
    assert sum(len(group.members) for group in groups) == len(list(MODEL.parameters()))
    assert len(groups) == 2  # small ones do not part the others


REFUSED = [
    ({"shares": "data:3:1"}, "cannot read --shares 'data:3:1'"),
    ({"shares": "context=3:1"}, "axis 'context' takes no shares; choose among data, .*, model"),
    ({"shares": "data=3:0"}, "shares of data are from 1"),
    ({"shares": "model=0:0"}, "shares of model are from 0, and one is above"),
    ({"shares": "data=3:1:1"}, "it says 3 shares of data, which has 2 ranks"),
    ({"shares": "shard=3:1"}, "there is no axis 'shard'"),
    ({"state_shares": "data=0:0", "zero": 1}, "one is above"),
    ({"min_tensor_size": -1}, "min_tensor_size is -1"),
]


@pytest.mark.parametrize(("options", "why"), REFUSED, ids=lambda x: "" if isinstance(x, dict) else x)
def test_shares_that_make_no_sense_are_refused(options, why):
    with pytest.raises(UsageError, match=why):
        ParallelConfig(**options).check({"data": 2})


def test_a_batch_too_small_for_the_shares_is_refused():
    place = all_positions({"data": 2})[0]
    check_batch(3, 1, Spec.parse("b/data:3:1 s"), place)
    with pytest.raises(UsageError, match="--batch-size 4 in 2 micro-batch.es. gives 2 sample.s. each"):
        check_batch(4, 2, Spec.parse("b/data:3:1 s"), place)


def test_another_mesh_goes_on_without_shares_of_the_first():
    model = build_model("gpt-nano")
    fitted, notices = ParallelConfig(shares="data=3:1", zero=1).fitted({"data": 4}, model)
    assert fitted == ParallelConfig(zero=1) and "continues without --shares data=3:1" in notices[0]
    with pytest.raises(UsageError, match="it says 2 shares of data"):
        ParallelConfig(shares="data=3:1").fitted({"data": 4}, model, given={"shares"})


def test_options_of_storage_without_effect_are_noted():
    notices = ParallelConfig(state_shares="data=3:1", min_tensor_size=9, offload_dir="/data").check({"data": 2})
    assert [notice.split(" has no effect")[0] for notice in notices] == [
        "--state-shares data=3:1", "--min-tensor-size 9", "--offload-dir /data",
    ]  # fmt: skip
