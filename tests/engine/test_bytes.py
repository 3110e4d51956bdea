"""What the layered engine sends, to the byte, against the formulas."""

from functools import partial

import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import Recompute, schedules
from spmd_engine.sharding.groups import THRESHOLD
from support import tiny
from support.pairwise import in_turn

ITEM = 8


def entries_of_a_step(axes, micro_batches=1, **options):
    """Sums over all ranks of calls and bytes, by label, of one step and the update that follows it."""

    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, **options)
            batch = tiny.batch(engine, 0, micro_batches)
            engine.count(batch)
            mesh.ledger.clear()
            engine.step(batch)
            engine.after_update()
            return engine.model.parameter_count, dict(mesh.ledger.entries)

    results = run_threads(program, tiny.ranks_of(axes))
    total: dict = {}
    for _, entries in results:
        for (operation, over, label), entry in entries.items():
            sums = total.setdefault((operation, over, label), [0, 0])
            sums[0] += entry.calls
            sums[1] += entry.sent
    return results[0][0], total


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_data_parallel_sends_the_gradients_once(ranks):
    parameters, total = entries_of_a_step({"data": ranks})
    calls, sent = total.pop(("all_reduce", "data", "gradients"))
    assert sent == 2 * parameters * ITEM * (ranks - 1)
    assert calls == ranks * -(-parameters * ITEM // THRESHOLD)
    assert set(total) == {("all_reduce", "data", "loss")}  # a number or two


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_tensor_parallel_reduces_each_branch_once_each_way(ranks):
    _, total = entries_of_a_step({"model": ranks})
    stream = tiny.BATCH * tiny.SIZE.context * tiny.SIZE.width * ITEM
    each = 2 * stream * (ranks - 1)  # an all_reduce of the residual stream, all ranks together
    for i in range(tiny.SIZE.layers):
        for branch in ("attention", "mlp"):
            assert total.pop(("all_reduce", "model", f"block{i}/{branch}")) == [2 * ranks, 2 * each]
    assert total.pop(("all_reduce", "model", "embedding")) == [ranks, each]  # forward alone
    assert total.pop(("all_reduce", "model", "head")) == [ranks, each]  # backward alone
    per_token = tiny.BATCH * tiny.SIZE.context * ITEM
    assert total.pop(("all_reduce", "model", "loss")) == [2 * ranks, 3 * 2 * per_token * (ranks - 1)]
    assert not total


@pytest.mark.parametrize("ranks", [2, 3])
def test_sequence_parallel_sends_the_same_bytes_as_gathers_and_scatters(ranks):
    _, total = entries_of_a_step({"model": ranks}, sequence_parallel=True)
    stream = tiny.BATCH * tiny.SIZE.context * tiny.SIZE.width * ITEM
    half = stream * (ranks - 1)
    for i in range(tiny.SIZE.layers):
        for branch in ("attention", "mlp"):
            for operation in ("all_gather", "reduce_scatter"):
                assert total[operation, "model", f"block{i}/{branch}"] == [2 * ranks, 2 * half]
    assert ("all_reduce", "model", "block0/mlp") not in total


def test_together_they_add_up():
    axes = {"data": 2, "model": 2}
    _, total = entries_of_a_step(axes)

    def local_parameters():
        with Mesh(**axes) as mesh:
            return sum(p.size for p in tiny.make_engine(mesh).parameters.values())

    held = run_threads(local_parameters, 4)
    # Each pair along data sends its own shard twice, less the half that stays.
    assert total["all_reduce", "data", "gradients"][1] == sum(held) * ITEM
    stream = tiny.BATCH * tiny.SIZE.context * tiny.SIZE.width * ITEM
    assert total["all_reduce", "model", "block0/mlp"][1] == 2 * 2 * stream


@in_turn(2, micro_batches=[1, 3], ranks=[2, 3, 8])
def test_zero_1_reduces_and_gathers_once(ranks, micro_batches):
    """2 S, as data parallel."""
    parameters, total = entries_of_a_step({"data": ranks}, micro_batches, zero=1)
    half = parameters * ITEM * (ranks - 1)
    assert total["reduce_scatter", "data", "gradients"] == [ranks, half]
    assert total["all_gather", "data", "parameters"] == [ranks, half]
    assert ("all_reduce", "data", "gradients") not in total


@in_turn(2, 1, micro_batches=[1, 3], ranks=[2, 3])
def test_zero_2_reduces_every_micro_batch(ranks, micro_batches):
    """(m + 1) S."""
    parameters, total = entries_of_a_step({"data": ranks}, micro_batches, zero=2)
    half = parameters * ITEM * (ranks - 1)
    assert total["reduce_scatter", "data", "gradients"] == [ranks * micro_batches, half * micro_batches]
    assert total["all_gather", "data", "parameters"] == [ranks, half]


WIDTH, WORDS, LAYERS = tiny.SIZE.width, tiny.SIZE.vocabulary, tiny.SIZE.layers
TABLE = WORDS * WIDTH  # elements of the embedding, and of the head's own
BLOCK = 12 * WIDTH**2 + 13 * WIDTH


@in_turn(2, 1, micro_batches=[1, 3], ranks=[2, 3])
def test_zero_3_gathers_twice_and_reduces_once_a_micro_batch(ranks, micro_batches):
    """3 m S, less what need not be gathered again: the last layer when the backward begins where the forward ended,
    and the first when the next forward begins where the backward did."""
    m = micro_batches
    parameters, total = entries_of_a_step({"data": ranks}, m, zero=3, group_threshold=0, tied=False)
    groups = 16 * LAYERS + 5
    gathered = 2 * m * parameters - m * TABLE - (m - 1) * TABLE
    assert total["all_gather", "data", "parameters"] == [
        ranks * (2 * m * groups - m - (m - 1)),
        gathered * ITEM * (ranks - 1),
    ]
    assert total["reduce_scatter", "data", "gradients"] == [ranks * m * groups, m * parameters * ITEM * (ranks - 1)]
    assert set(total) == {
        ("all_gather", "data", "parameters"),
        ("reduce_scatter", "data", "gradients"),
        ("all_reduce", "data", "loss"),
    }


def test_one_group_stays_gathered():
    """All parameters in one group: S for the gather and S for the reduction."""
    parameters, total = entries_of_a_step({"data": 2}, zero=3)
    assert total["all_gather", "data", "parameters"] == [2, parameters * ITEM]


def test_recomputation_gathers_no_more():
    """A block's parameters are gathered once for its second forward and its backward."""
    options = {"zero": 3, "group_threshold": 0, "tied": False}
    _, plain = entries_of_a_step({"data": 2}, **options)
    _, again = entries_of_a_step({"data": 2}, **options, recompute=Recompute.BLOCK)
    assert again["all_gather", "data", "parameters"] == plain["all_gather", "data", "parameters"]


def test_recomputation_repeats_the_collectives_of_a_forward():
    _, plain = entries_of_a_step({"model": 2})
    _, again = entries_of_a_step({"model": 2}, recompute=Recompute.BLOCK)
    for branch in ("attention", "mlp"):
        key = "all_reduce", "model", f"block0/{branch}"
        assert [2 * n for n in again[key]] == [3 * n for n in plain[key]]
    _, attention = entries_of_a_step({"model": 2}, recompute=Recompute.ATTENTION)
    assert attention["all_reduce", "model", "block0/mlp"] == plain["all_reduce", "model", "block0/mlp"]
    assert [2 * n for n in attention["all_reduce", "model", "block0/attention"]] == [
        3 * n for n in plain["all_reduce", "model", "block0/attention"]
    ]


def test_the_hybrid_reduces_parts_over_replicas():
    """S(s-1)/s scattered and gathered over shard, and S/s reduced over replicate: each rank's part alone."""
    parameters, total = entries_of_a_step({"replicate": 2, "shard": 2}, group_threshold=1 << 30)
    assert total["reduce_scatter", "shard", "gradients"] == [4, 2 * parameters * ITEM]
    assert total["all_gather", "shard", "parameters"] == [4, 2 * parameters * ITEM]
    assert total["all_reduce", "replicate", "gradients"] == [4, 2 * parameters * ITEM]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 3), (3, 2)])
def test_a_pipeline_sends_the_stream_at_every_boundary(stages, micro_batches):
    """b s d at each boundary and direction, whatever the number of micro-batches; and the tied table twice."""
    _, total = entries_of_a_step({"pipe": stages}, micro_batches)
    stream = tiny.BATCH * tiny.SIZE.context * WIDTH * ITEM
    boundaries = stages - 1
    assert total["send", "pipe", "input"] == [boundaries * micro_batches, boundaries * stream]
    assert total["send", "pipe", "gradient"] == [boundaries * micro_batches, boundaries * stream]
    assert total["all_reduce", "pipe", "gradients"] == [2, 2 * TABLE * ITEM]
    _, untied = entries_of_a_step({"pipe": stages}, micro_batches, tied=False)
    assert ("all_reduce", "pipe", "gradients") not in untied


def test_interleaved_chunks_multiply_the_boundaries():
    _, total = entries_of_a_step({"pipe": 2}, 2, schedule=schedules.named("interleaved"))
    stream = tiny.BATCH * tiny.SIZE.context * WIDTH * ITEM
    assert total["send", "pipe", "input"] == [2 * 3, 3 * stream]


def test_everything_together():
    """pipe=2,data=2,model=2, ZeRO-1: each axis sends what it would alone, of what it cuts."""
    axes = {"pipe": 2, "data": 2, "model": 2}
    _, total = entries_of_a_step(axes, 2, zero=1, tied=False)

    def local_parameters():
        with Mesh(**axes) as mesh:
            return sum(p.size for p in tiny.make_engine(mesh, tied=False).parameters.values())

    held = run_threads(local_parameters, 8)
    # A pair along data reduces and gathers its common block once: half of it a rank.
    assert total["reduce_scatter", "data", "gradients"][1] == sum(held) // 2 * ITEM
    assert total["all_gather", "data", "parameters"][1] == sum(held) // 2 * ITEM
    stream = tiny.BATCH * tiny.SIZE.context * WIDTH * ITEM
    assert total["send", "pipe", "input"][1] == 2 * stream  # of both ranks along model
    assert total["all_reduce", "model", "block0/mlp"][1] == 2 * 2 * stream


def test_micro_batches_do_not_multiply_the_gradients():
    def program(micro_batches):
        with Mesh(data=2) as mesh:
            engine = tiny.make_engine(mesh)
            batch = tiny.batch(engine, 0, micro_batches)
            mesh.ledger.clear()
            engine.step(batch)
            return mesh.ledger.total("all_reduce", "data", "gradients").sent

    assert run_threads(partial(program, 1), 2) == run_threads(partial(program, 4), 2)


@pytest.mark.parametrize(("nodes", "calls"), [(["a", "a"], 0), (["a", "b"], 1)])
def test_replicas_on_one_node_each_take_the_norm_of_the_gradients_that_all_have(nodes, calls):
    def program():
        with Mesh(data=2) as mesh:
            engine = tiny.make_engine(mesh)
            engine.step(tiny.batch(engine, 0))
            return engine.gradient_norm(), mesh.ledger.total(label="gradient norm").calls

    (norm, _), (other, _) = results = run_threads(program, 2, nodes=nodes)
    assert norm == other and [found for _, found in results] == [calls] * 2


def test_one_rank_sends_nothing():
    def program():
        with Mesh(data=1, model=1) as mesh:
            engine = tiny.make_engine(mesh)
            engine.step(tiny.batch(engine, 0))
            engine.gradient_norm()
            return mesh.ledger.total().calls

    assert run_threads(program, 1) == [0]
