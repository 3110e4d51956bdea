"""Pipeline stages with different tensor-parallel sizes compute what one device computes."""

import copy
import json
import pickle
from functools import cache, partial

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.precision import dtype_of
from spmd_engine.axes import parse_axes
from spmd_engine.engine import SGD, Recompute, schedules
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from support import combinations, routed, tiny

train_once = cache(lambda **options: tiny.train({"data": 1}, **options)[0])

#: Options that change results.
COMPUTED = {"dropout", "tied", "micro_batches", "layers", "optimizer"}

CASES = {
    "pipe=2,model=1|2": {"dropout": 0.1},
    "pipe=2,model=2|1": {"sequence_parallel": True, "dropout": 0.1, "zero": 1},
    "pipe=3,model=1|2|1": {"layers": 3, "sequence_parallel": True, "recompute": Recompute.BLOCK},
    "pipe=2,model=3|1": {"tied": False, "schedule": "interleaved", "micro_batches": 4, "layers": 3},
    "pipe=2,model=2|3": {"sequence_parallel": True, "schedule": "zero-bubble", "micro_batches": 3},
    "data=2,pipe=2,model=1|2": {"zero": 3, "sequence_parallel": True, "dropout": 0.1},
    "pipe=2,data=2,model=2|1": {"zero": 2, "schedule": "interleaved", "layers": 3},
    "model=1|2,pipe=2,data=2": {"zero": 1, "group_threshold": 0, "optimizer": partial(SGD, momentum=0.9)},
    "context=2,pipe=2,model=1|2": {"sequence_parallel": True, "zigzag": True},
}


#: Those of other sizes or orders, whose options other cases have.
LATER = {"pipe=2,model=2|3", "pipe=2,data=2,model=2|1", "pipe=2,model=1|2", "model=1|2,pipe=2,data=2"}


@pytest.mark.parametrize("mesh", [pytest.param(mesh, marks=[pytest.mark.soak] * (mesh in LATER)) for mesh in CASES])
def test_uneven_stages_train_as_one_device_does(mesh):
    options = dict(CASES[mesh])
    expected = train_once(**{name: value for name, value in options.items() if name in COMPUTED})
    if "schedule" in options:
        options["schedule"] = schedules.named(options["schedule"])
    tiny.assert_same_training(tiny.train(parse_axes(mesh), **options), expected)


@pytest.mark.mpi(ranks=3)
def test_mpi_ranks_train_as_one_device_does():
    options, one = {"dropout": 0.1}, combinations.one_device(dropout=0.1)
    for mesh, parallel in (("pipe=2,model=1|2", False), ("pipe=2,model=2|1", True)):
        found = combinations.train_gpt(
            parse_axes(mesh), launch=lambda program, ranks: [program()], sequence_parallel=parallel, **options
        )
        combinations.assert_same(found, one)


def test_experts_too():
    how = {"sequence_parallel": True}
    found = routed.train(parse_axes("pipe=2,model=2|1"), layout=tuple(how.items()), of=(("router", "all losses"),))
    routed.assert_as_alone(found, routed.alone(of=(("router", "all losses"),)))


def test_in_half_precision_the_loss_is_close():
    for dtype in ("bfloat16", "float16"):
        options = {"dtype": dtype_of(dtype)}
        (losses, *_), *_ = tiny.train(parse_axes("pipe=2,model=1|2"), **options)
        np.testing.assert_allclose(np.array(losses)[:, 0], np.array(train_once()[0])[:, 0], rtol=2e-2)


def boundary(axes, **options):
    """Bytes that all ranks send between stages in a step, by label; and how often a rank sends."""

    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, **options)
            batch = tiny.batch(engine, 0, 1)
            mesh.ledger.clear()
            engine.step(batch)
            entries = mesh.ledger.entries
            return {
                label: entries["send", "pipe,model", label]
                for label in ("input", "gradient")
                if ("send", "pipe,model", label) in entries
            }

    ranks = run_threads(program, tiny.ranks_of(axes))
    return {label: sum(rank[label].sent for rank in ranks if label in rank) for label in ("input", "gradient")}


STREAM = tiny.BATCH * tiny.SIZE.context * tiny.SIZE.width * 8


@pytest.mark.parametrize(
    ("sizes", "parallel", "copies"),
    [((1, 2), False, (2, 1)), ((3, 1), False, (1, 3)), ((1, 2), True, (1, 1)), ((3, 2), True, (1, 1))],
)
def test_every_rank_receives_what_it_needs_once(sizes, parallel, copies):
    sent = boundary({"pipe": 2, "model": sizes}, sequence_parallel=parallel)
    assert sent == {"input": copies[0] * STREAM, "gradient": copies[1] * STREAM}


def test_sequences_shorter_than_a_stage_leave_ranks_without_positions():
    """One token more of a sequence goes to one rank of a stage; the others have none."""

    def program(axes):
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, sequence_parallel=True)
            with engine.inference():
                y = engine.forward(np.array([[3], [5]]))
                return None if y is None else engine.join_outputs(y)

    (expected,) = run_threads(partial(program, {"data": 1}), 1)
    for sizes in ((3, 1), (1, 3)):
        *_, y = run_threads(partial(program, {"pipe": 2, "model": sizes}), 4)
        np.testing.assert_allclose(y, expected, atol=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_tied_parameter_has_equal_bits_on_both_stages(zero):
    results = tiny.train(parse_axes("data=2,pipe=2,model=1|2"), dtype=np.float32, zero=zero)
    whole = {stage: np.full((13, 12), np.nan, np.float32) for stage in (0, 1)}
    for rank, (_, _, stored) in enumerate(results):
        index, part = stored["embedding/table"]
        whole[rank % 3 > 0][index] = part
    assert np.isfinite(whole[0]).all() and np.array_equal(*whole.values())


def test_uneven_sizes_survive_json_and_copies():
    axes = parse_axes("pipe=2,model=1|2")
    composition = ParallelConfig(mesh=axes)
    assert ParallelConfig.from_json(json.loads(json.dumps(composition.as_json()))).mesh == axes
    assert (
        ParallelConfig(mesh={"pipe": 2, "model": [1, 2]}) == composition != ParallelConfig(mesh={"pipe": 2, "model": 2})
    )
    assert pickle.loads(pickle.dumps(axes)) == copy.deepcopy(axes) == axes


@pytest.mark.parametrize(
    ("mesh", "options", "text"),
    [
        ("pipe=2,data=1|2", {}, "only axis model can have other sizes on other stages"),
        ("pipe=2,model=1|2,queries=2", {}, "only axis model can have other sizes on other stages"),
        ("pipe=2,model=1|2", {"shares": "model=1:2"}, "it says 2 shares of model, which has 1|2 ranks"),
    ],
)
def test_what_does_not_work_is_refused(mesh, options, text):
    with pytest.raises(UsageError, match=text.replace("|", r"\|")):
        ParallelConfig(**options).check(parse_axes(mesh))
