"""What the layered engine sends, to the byte, against the formulas."""

from functools import partial

import pytest

import tiny
from spmd_engine import Mesh, run
from spmd_engine.sharding.groups import THRESHOLD

ITEM = 8


def entries_of_a_step(axes, **options):
    """Sums over all ranks of calls and bytes, by label, of one step of one micro-batch."""

    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, **options)
            batch = tiny.batch(engine, 0, micro_batches=1)
            engine.count(batch)
            mesh.ledger.clear()
            engine.step(batch)
            return engine.model.parameter_count, dict(mesh.ledger.entries)

    results = run(program, tiny.ranks_of(axes))
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

    held = run(local_parameters, 4)
    # Each pair along data sends its own shard twice, less the half that stays.
    assert total["all_reduce", "data", "gradients"][1] == sum(held) * ITEM
    stream = tiny.BATCH * tiny.SIZE.context * tiny.SIZE.width * ITEM
    assert total["all_reduce", "model", "block0/mlp"][1] == 2 * 2 * stream


def test_micro_batches_do_not_multiply_the_gradients():
    def program(micro_batches):
        with Mesh(data=2) as mesh:
            engine = tiny.make_engine(mesh)
            batch = tiny.batch(engine, 0, micro_batches)
            mesh.ledger.clear()
            engine.step(batch)
            return mesh.ledger.total("all_reduce", "data", "gradients").sent

    assert run(partial(program, 1), 2) == run(partial(program, 4), 2)


def test_one_rank_sends_nothing():
    def program():
        with Mesh(data=1, model=1) as mesh:
            engine = tiny.make_engine(mesh)
            engine.step(tiny.batch(engine, 0))
            engine.gradient_norm()
            return mesh.ledger.total().calls

    assert run(program, 1) == [0]
