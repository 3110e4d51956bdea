"""What storage comes to in an engine: gathers, sums and bytes of a step, and what stays between steps."""

from collections import Counter
from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.comm.connections import Connections, Tuning
from spmd_engine.engine import LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.pipeline import Recompute
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.layers import Linear
from spmd_engine.losses import mean_squared_error
from spmd_engine.models import Model, deep_mlp
from spmd_engine.sharding import Layout
from support import tiny
from support.pairwise import every_pair
from support.stored import FLOAT, every_stage_of_zero, integers, pair_bytes


def engine_on(mesh, model, **options):
    return LayeredEngine(model, mesh, Layout.for_mesh(mesh), dtype=FLOAT, **options)


def batch_for(engine, micro_batches):
    x = integers((6, 4), 1) / 99
    return batch_of(x, x[::-1].copy(), engine, micro_batches)


def counted(mesh):
    """Calls and bytes since the last time, by operation and label."""
    found = {key[::2]: (entry.calls, entry.sent) for key, entry in mesh.ledger.entries.items()}
    mesh.ledger.clear()
    return found


@every_pair(
    recompute=[Recompute.NONE, Recompute.BLOCK], **{"pairs, micro_batches": [(1, 1), (2, 3), (6, 2)]}, zero=range(4)
)
def test_calls_and_bytes_of_a_step(zero, pairs, micro_batches, recompute):
    """Fully sharded, each group is gathered once a forward and once a backward, but for the group that is there.

    That is the last of a forward when the backward begins, and the first of that when the next forward does.
    Recomputation gathers nothing more: what it opens is what the backward is about to use.
    """
    ranks, count = 2, 6 // pairs

    def program():
        with Mesh(data=ranks) as mesh:
            storage = ZeroConfig(zero, pairs * pair_bytes(4))
            engine = engine_on(mesh, deep_mlp(12, 4), storage=storage, recompute=recompute)
            batch = batch_for(engine, micro_batches)
            mesh.ledger.clear()
            for _ in range(2):
                engine.step(batch)
                engine.after_update()
                yield counted(mesh)

    gathers = {0: 0, 1: count, 2: count, 3: count + (2 * micro_batches - 1) * (count - 1)}[zero]
    sums = count * micro_batches if zero >= 2 else count
    operation = "reduce_scatter" if zero else "all_reduce"
    for steps in zip(*run_threads(lambda: list(program()), ranks)):
        for found in steps:
            assert found.get(("all_gather", "parameters"), (0,))[0] == gathers
            assert found[operation, "gradients"][0] == sums
            assert sum(label == "gradients" for _, label in found) == 1
        sent = sum((Counter({key: size for key, (_, size) in found.items()}) for found in steps), Counter())
        group = pairs * pair_bytes(4) * (ranks - 1)
        assert sent["all_gather", "parameters"] == gathers * group
        assert sent[operation, "gradients"] == sums * group * (1 if zero else 2)


@pytest.mark.parametrize("recompute", [Recompute.BLOCK, Recompute.ATTENTION])
def test_recomputing_blocks_of_several_groups_gathers_nothing_more(recompute):
    def program(recompute):
        with Mesh(data=2) as mesh:
            engine = tiny.make_engine(mesh, zero=3, tied=False, group_threshold=1500, recompute=recompute)
            batch = tiny.batch(engine, 0, micro_batches=2)
            mesh.ledger.clear()
            engine.step(batch)
            return len(engine.assignment.groups), counted(mesh)["all_gather", "parameters"][0]

    expected = run_threads(program, 2, args=(Recompute.NONE,))
    assert expected[0][0] > 6  # groups of less than a block
    assert run_threads(program, 2, args=(recompute,)) == expected


def test_evaluation_gathers_once_a_forward():
    def program():
        with Mesh(data=2) as mesh:
            engine = engine_on(mesh, deep_mlp(12, 4), storage=ZeroConfig(3, pair_bytes(4)))
            batch = batch_for(engine, 2)
            mesh.ledger.clear()
            engine.evaluate(batch)
            return counted(mesh)["all_gather", "parameters"][0]

    assert run_threads(program, 2) == [12, 12]


def test_nothing_stays_whole_between_steps():
    """It would take memory, and hide that somebody has changed the parameters meanwhile."""

    def program():
        with Mesh(data=2) as mesh:
            engine = engine_on(mesh, deep_mlp(12, 4), storage=ZeroConfig(3, pair_bytes(4)))
            batch = batch_for(engine, 2)
            for compute in (engine.step, engine.evaluate):
                compute(batch)
                assert all(storage.whole_parameters is None for storage in engine.storages)
                for parameter in engine.parameters.values():
                    parameter *= 1.5
            changed = engine.evaluate(batch)
            engine.after_update()
            assert engine.evaluate(batch) == changed

    run_threads(program, 2)


@every_stage_of_zero
def test_a_step_after_one_that_broke_off_is_right(zero, monkeypatch):
    monkeypatch.setattr(Connections, "tuning", Tuning(piece=256))

    def program():
        with Mesh(data=2) as mesh:
            engine = tiny.make_engine(mesh, group_threshold=3000, zero=zero)
            batch, (_, first) = tiny.batch(engine, 0), engine.model.layers[0]
            expected = engine.step(batch), engine.gradient_norm()
            calls = []

            def broken(*args):
                calls.append(args)
                if len(calls) == 2:  # in the last micro-batch, when other groups are on their way
                    raise RuntimeError
                return type(first).backward_weight(first, *args)

            first.backward_weight = broken
            with pytest.raises(RuntimeError):
                engine.step(batch)
            del first.backward_weight
            assert (engine.step(batch), engine.gradient_norm()) == expected

    run_threads(program, 2)


def autoencoder(width=6):
    """Its decoder has the encoder's weights, in the opposite order; all of them of one shape."""
    letters = [("d", "f"), ("f", "d"), ("d", "f"), ("f", "d")]
    layers = [Linear((i, width), (o, width), bias=False) for i, o in letters]
    layers[2].tied, layers[3].tied = {"weights": "layer_1/weights"}, {"weights": "layer_0/weights"}
    named = tuple((f"layer_{number}", layer) for number, layer in enumerate(layers))
    return Model("autoencoder", named, "b d", "b d", "b d", mean_squared_error)


@pytest.mark.parametrize("axes", [{"pipe": 2}, {"pipe": 2, "data": 2}, {"data": 2, "pipe": 4}], ids=tiny.mesh_id)
@pytest.mark.parametrize("zero", [0, 3])
def test_stages_may_finish_with_what_they_share_in_different_orders(axes, zero):
    x = integers((8, 6), 1) / 99

    def program():
        with Mesh(**axes) as mesh:
            engine = engine_on(mesh, autoencoder(), storage=ZeroConfig(zero))
            engine.step(batch_of(x, x[::-1].copy(), engine, 2))
            return engine.gradient_norm(), {n: engine.gather_owned(n, engine.gradients) for n in engine.names}

    def alone():
        engine = LayeredEngine(autoencoder(), dtype=FLOAT)
        engine.step(batch_of(x, x[::-1].copy(), engine, 2))
        return engine.gradient_norm(), engine.named(engine.gradients)

    ((norm, gradients),) = run_threads(alone, 1)
    for result in run_threads(program, prod(axes.values())):
        np.testing.assert_allclose(result[0], norm, rtol=1e-12)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(result[1][name], gradient, atol=1e-13)
