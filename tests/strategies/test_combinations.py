"""Every strategy, alone and composed with others, trains as one device does.

The same few clipped steps of a small GPT with dropout, in float64; batches, sequences, heads, words and layers do
not divide by the numbers of ranks.
"""

from functools import partial

import pytest

from spmd_engine.engine import SGD
from spmd_engine.engine.schedules import named
from support.combinations import ATTENTION, BLOCK, PARALLEL, Case, assert_as_one_device


def holds(cases, soak=()):
    """Tests that cases train as one device does; in ``soak``, those of more ranks that show what others do."""

    @pytest.mark.parametrize("case", [*cases, *(pytest.param(case, marks=pytest.mark.soak) for case in soak)], ids=str)
    def test(case):
        assert_as_one_device(case)

    return test


MOMENTUM = partial(SGD, momentum=0.9, weight_decay=0.1)
test_data_parallel = holds(
    [
        Case("data=3", micro_batches=5),  # of two samples a micro-batch: some rank has none
        Case("data=3", dropout=0.0, tied=False),
    ],
    soak=[Case("data=2")],
)
test_sharded_state = holds(
    [
        Case("data=3", zero=1, group_threshold=0),
        Case("data=4", zero=2, micro_batches=3, tied=False),
        Case("data=3", zero=3, group_threshold=1500, optimizer=MOMENTUM),
    ],
    soak=[
        Case("data=2", zero=2, micro_batches=1),
        Case("data=2", zero=1),
        Case("data=2", zero=3, micro_batches=3),
        Case("data=4", zero=3, group_threshold=1500, tied=False),
        Case("data=6", zero=3, group_threshold=3000, micro_batches=5),
    ],
)
test_replicas_of_shards = holds(
    [
        Case("replicate=2,shard=2", micro_batches=3),
        Case("data=2,shard=2", zero=2, micro_batches=3),
    ],
    soak=[
        Case("shard=3", group_threshold=1500),
        Case("shard=4"),
        Case("data=2,shard=2", group_threshold=1500),
        Case("replicate=2,shard=2", zero=1),
        Case("shard=2,replicate=3", tied=False),
    ],
)
test_tensor_parallel = holds(
    [
        Case("model=2", tied=False),
        Case("model=3", recompute=BLOCK, **PARALLEL),
    ],
    soak=[
        Case("model=2"),
        Case("model=4", tied=False),
        Case("model=3", **PARALLEL),
        Case("model=4", recompute=BLOCK, **PARALLEL),
    ],
)
test_shares_of_heads_and_widths = holds(
    [
        Case("model=3", shares="model=1:2:0", tied=False, **PARALLEL),
        Case("data=2,model=2", shares="data=2:1,model=3:1", zero=3, group_threshold=1500),
        Case("pipe=2,model=2", shares="model=0:1", zero=1, schedule="zero-bubble", micro_batches=3),
    ],
    soak=[
        Case("context=2,model=2", shares="model=5:2", context_method="ring", zigzag=True, recompute=ATTENTION),
        Case("model=2", shares="model=2:1"),
        Case("data=2,model=2", shares="data=2:1,model=3:1", zero=3, group_threshold=1500, recompute=BLOCK, **PARALLEL),
        Case("model=4", shares="model=100:1:1:1", micro_batches=1),
        Case("data=2,model=3", shares="model=5:0:2", zero=2),
        Case("context=2,model=2", shares="model=1:5", context_method="ulysses", zero=3, **PARALLEL),
        Case("replicate=2,shard=2,model=2", shares="model=3:2,replicate=1:2", tied=False),
        Case("pipe=2,model=3", shares="model=0:1:1", schedule="interleaved", **PARALLEL),
        Case("model=3", shares="model=7:2:1", steps=10),
    ],
)
test_context_parallel = holds(
    [
        *[Case("context=3", context_method=method, zigzag=True) for method in ("gather", "ring", "ulysses")],
        Case("context=2", context_method="ulysses", zero=3, recompute=ATTENTION),
    ],
    soak=[
        Case("context=2", context_method="ring", micro_batches=3),
        *[Case("context=2", context_method=method) for method in ("gather", "ring", "ulysses")],
        Case("context=4", context_method="ring", micro_batches=3),
        Case("context=4", context_method="ulysses", zero=3, recompute=ATTENTION),
    ],
)
test_recomputation = holds(
    [
        Case("data=2", zero=3, group_threshold=1500, recompute=BLOCK),
        Case("model=2", recompute=ATTENTION, **PARALLEL),
    ],
    soak=[
        Case("data=1", recompute=BLOCK),
        Case("data=1", recompute=ATTENTION),
        Case("data=2", zero=3, group_threshold=1500, recompute=ATTENTION),
    ],
)
PIPELINES = [("naive", None), ("gpipe", None), ("1f1b", None), ("interleaved", None), ("interleaved", 3)]
PIPELINES += [("zero-bubble", None), ("zero-bubble-h2", None)]
CHUNKS = {2: (0, 3), 3: (0, 1, 6), 4: (0, 1, 5, 7), 6: (0, 1, 2, 3, 5, 7)}


def division(number, chunks):
    """Even, by cost or said, in turn."""
    return ("even", "cost", CHUNKS[chunks])[number % 3]


def on_two_stages(*which):
    """Each schedule with one of four numbers of micro-batches, in turn; for each more of ``which`` with the next."""
    return [
        Case("pipe=2", schedule=name, chunks=v, micro_batches=m, stages=division(i + m, 2 * named(name, v).chunks))
        for i, (name, v) in enumerate(PIPELINES)
        for m in ((3, 5, 1, 2)[(i + each) % 4] for each in which)
    ]


def on_three_stages(which):
    """Three schedules, each with few micro-batches or more, in turn; ``which``: these, 0, or the others, 1."""
    names = [name for name, _ in PIPELINES[1:4]]
    return [Case("pipe=3", schedule=name, micro_batches=(5, 2)[(i + which) % 2]) for i, name in enumerate(names)]


test_pipelines = holds(
    [
        *on_two_stages(0)[::2],
        *on_three_stages(0)[::2],
        Case("pipe=2", tied=False, dropout=0.0, recompute=BLOCK),
        Case("data=1", schedule="interleaved", chunks=3),  # all chunks on the only stage
    ],
    soak=[
        *on_two_stages(0)[1::2],
        Case("pipe=4", schedule="zero-bubble", micro_batches=5, stages=CHUNKS[4]),
        *on_three_stages(0)[1::2],
        Case("pipe=3", recompute=ATTENTION, micro_batches=3),
        Case("pipe=4", schedule="interleaved", tied=False),
        *on_two_stages(1, 2, 3),
        *on_three_stages(1),
    ],
)


def in_parts(*which):
    """Each schedule with a stage of ZeRO, in turn, beginning with 3; and for each more of ``which`` with the next."""
    return [
        Case("pipe=2,data=2", zero=(3, 1, 2)[(i + each) % 3], schedule=name, chunks=v, micro_batches=3)
        for i, (name, v) in enumerate(PIPELINES)
        for each in which
    ]


test_pipelines_of_parts = holds(
    [
        *in_parts(0)[2::2],
    ],
    soak=[
        Case("pipe=2,shard=2", group_threshold=1500, schedule="zero-bubble", recompute=BLOCK),
        *in_parts(0)[:2],
        in_parts(0)[3],
        in_parts(0)[5],
        *in_parts(1, 2),
        Case("data=3,pipe=2", zero=3, schedule="gpipe", micro_batches=5, tied=False),
    ],
)
test_stages_that_overlap = holds(
    [
        Case("pipe=2", overlap=4, schedule="zero-bubble", micro_batches=5),  # both stages hold all layers
        Case("pipe=3", overlap=2, stages=CHUNKS[3], tied=False, recompute=BLOCK),
        Case("pipe=2,data=2", overlap=((1, 5),), stages=CHUNKS[2], zero=2),
        Case("pipe=2,model=2", overlap=1, stages="cost", **PARALLEL),
    ],
    soak=[
        Case("pipe=2,shard=2", overlap=1, group_threshold=1500),
        Case("pipe=4", overlap=3, group_threshold=1500),  # some layers are on three stages
        Case("pipe=2", overlap=1),
        Case("pipe=2,data=2", overlap=2, schedule="gpipe"),
        Case("data=2,pipe=2", overlap=1, zero=1, micro_batches=3),
        Case("replicate=2,shard=2,pipe=2", overlap=2, zero=1),
    ],
)
test_two_ways_together = holds(
    [
        Case("data=2,model=2", zero=2, micro_batches=3, **PARALLEL),
        Case("data=2,context=2", zero=3, context_method="ring", zigzag=True),
        Case("context=2,model=2", context_method="ring", zigzag=True, **PARALLEL),
        Case("context=2,pipe=2", context_method="ring", zigzag=True, schedule="zero-bubble", recompute=ATTENTION),
        Case("pipe=2,model=2", schedule="interleaved", micro_batches=2, **PARALLEL),
    ],
    soak=[
        Case("pipe=2,context=2", context_method="gather", zero=1),
        Case("model=2,context=2", context_method="ulysses", zero=2),
        Case("context=2,data=2", zero=1, zigzag=True, micro_batches=5),
        Case("context=2,shard=2", context_method="ulysses"),
        Case("shard=2,model=2", tied=False),
        Case("data=2,model=2", zero=1, **PARALLEL),
        Case("data=3,model=2", zero=2, micro_batches=3, **PARALLEL),
        Case("data=2,model=2", zero=3, group_threshold=1500, recompute=BLOCK, **PARALLEL),
        Case("context=3,data=2", zero=1, zigzag=True, micro_batches=5),
        Case("model=3,context=2", context_method="ulysses", zero=2),
        *[Case("pipe=2,context=2", context_method=method, zero=zero) for method, zero in (("ring", 3), ("ulysses", 2))],
        Case("pipe=2,model=2", schedule="interleaved", micro_batches=5, **PARALLEL),
        Case("model=3,pipe=2", schedule="zero-bubble-h2", recompute=BLOCK, stages="cost", **PARALLEL),
    ],
)
test_three_ways_together = holds(
    [
        Case("model=2,pipe=2,data=2", schedule="zero-bubble", zero=3, micro_batches=3, **PARALLEL),
    ],
    soak=[
        Case("replicate=2,shard=2,pipe=2", schedule="interleaved", recompute=ATTENTION),
        Case("pipe=2,data=2,model=2", schedule="1f1b", zero=1, recompute=BLOCK, **PARALLEL),
        Case("pipe=2,context=2,model=2", zero=3, recompute=BLOCK, context_method="ring"),
        Case("data=2,context=2,model=2", zero=3, zigzag=True, tied=False, **PARALLEL),
        Case("pipe=2,data=2,model=2", schedule="1f1b"),
    ],
)
test_eight_ranks_two_ways = holds(
    [],
    soak=[
        Case("pipe=8", schedule="zero-bubble", micro_batches=4),  # a stage has half a block
        Case("data=8", zero=3, group_threshold=3000),
        Case("replicate=2,shard=4"),
        Case("pipe=4,data=2", schedule="interleaved"),
        Case("context=4,data=2", context_method="ring"),
        Case("context=4,data=2", context_method="ulysses", zigzag=True),
        Case("model=4,data=2", zero=2, **PARALLEL),
    ],
)
test_ten_steps = holds(
    [],
    soak=[
        Case("data=2", zero=1, steps=10),
        Case("pipe=2,data=2", zero=1, schedule="zero-bubble", micro_batches=3, steps=10),
        Case("data=3", zero=3, group_threshold=1500, steps=10),
    ],
)
