"""An engine that goes on, on another mesh: parameters, buffers and optimizer state move, and nothing else changes."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from test_layer_contract import MICRO_BATCHES

from spmd_engine import Mesh, run_threads, world
from spmd_engine.engine import AdamW, LayeredEngine, schedules
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.pipeline import Recompute
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import two_layers
from spmd_engine.sharding import Layout
from spmd_engine.training import Trainer
from support import tiny
from support.own_layers import text_model, tokens
from support.pairwise import in_turn
from support.traced_memory import peak_of

WAYS = [
    ({"data": 4}, {}, {"model": 4}, {}),
    ({"model": 3}, {"shares": {"model": (2, 0, 1)}}, {"model": 3}, {}),
    ({"data": 2, "model": 2}, {"zero": 1}, {"data": 2, "model": 2}, {"zero": 3, "shares": {"model": (1, 5)}}),
    ({"data": 4}, {"zero": 3}, {"data": 2, "model": 2}, {"zero": 1}),
    ({"pipe": 2, "data": 2}, {"zero": 2}, {"data": 4}, {"zero": 3}),
    ({"data": 4}, {"zero": 1}, {"pipe": 2, "model": 2}, {"schedule": "zero-bubble"}),
    ({"pipe": 4}, {"schedule": "1f1b"}, {"context": 2, "data": 2}, {"recompute": Recompute.BLOCK}),
    ({"replicate": 2, "shard": 2}, {}, {"pipe": 2, "data": 2}, {"schedule": "interleaved", "zero": 1}),
    ({"pipe": 2, "data": 2}, {"zero": 2, "overlap": 1}, {"pipe": 4}, {"overlap": 2}),
    ({"data": 3}, {"zero": 2}, {"model": 3}, {}),
]
UNEVEN = {"pipe": 2, "model": (1, 2)}
WAYS[:0] = [({"data": 3}, {"zero": 1}, UNEVEN, {}), (UNEVEN, {}, {"data": 3}, {"zero": 3})]
#: An overlap of layers 1 to 3 of 6, and more: the boundaries move within it.
WITHIN = [
    pytest.param({"pipe": 2}, ((1, 4),), "0,2", "0,4", None, marks=pytest.mark.soak),
    pytest.param({"pipe": 2, "data": 2}, ((1, 4),), "0,3", "0,1", 1, marks=pytest.mark.soak),
    ({"pipe": 2, "data": 2}, ((2, 4),), "0,2", "0,3", 3),
    pytest.param({"pipe": 3}, ((1, 3), (3, 6)), "0,1,4", "0,2,3", None, marks=pytest.mark.soak),
]


def options(mesh, zero=None, schedule=None, shares=(), overlap=0, **others):
    layout = replace(Layout.for_mesh(mesh), shares=dict(shares))
    chosen = {"schedule": schedules.named(schedule)} if schedule else {}
    return {"layout": layout, "storage": ZeroConfig(zero, threshold=3000, overlap=overlap), **chosen, **others}


def trained(before, how_before, after=None, how_after=None):
    """Losses of three steps, the mesh changed after one of them, and all parameters, buffers and state at the end."""

    def program():
        with Mesh(**before) as mesh:
            engine = LayeredEngine(text_model(), mesh, dtype=np.float64, seed=5, **options(mesh, **how_before))
            optimizer = AdamW()
            batches = lambda step: batch_of(*tokens(step), engine, MICRO_BATCHES, step)
            trainer = Trainer(engine, optimizer, batches, lambda step: 0.05, grad_clip=0.3)
            losses = [report.loss for report in trainer.run(1)]
            sent = None
            if after:
                other = Mesh(**after)
                engine.reshard(other, optimizer=optimizer, **options(other, **how_after))
                sent = mesh.ledger.total(label="reshard").sent + other.ledger.total(label="reshard").sent
            losses += [report.loss for report in trainer.run(3)]
            arrays = {name: engine.gather(name) for name in engine.names}
            arrays |= {name: engine.gather_buffer(name) for name in engine.buffer_names}
            for kind, state in optimizer.state.items():
                arrays |= {f"{kind} of {name}": engine.gather_owned(name, state) for name in engine.names}
            return losses, arrays, sent

    return run_threads(program, tiny.ranks_of(before))


@cache
def on_one_device():
    """Losses and arrays; not to be written to."""
    ((losses, arrays, _),) = trained({"data": 1}, {})
    return losses, arrays


#: A quarter, with each kind of cut before or after; the rest is in ``soak``.
@in_turn(4, way=WAYS)
def test_training_goes_on_as_if_nothing_had_happened(way):
    expected, arrays = on_one_device()
    for losses, ours, _ in trained(*way):
        np.testing.assert_allclose(losses, expected, rtol=1e-11)
        for name, array in arrays.items():
            np.testing.assert_allclose(ours[name], array, rtol=0, atol=1e-10, err_msg=name)


def test_replicas_that_become_blocks_send_nothing():
    """All have all parameters, and what they need of the state; only what nobody has must travel."""
    assert [sent for _, _, sent in trained({"data": 2}, {}, {"model": 2}, {})] == [0, 0]


@pytest.mark.parametrize("axes, overlap, stages, others, zero", WITHIN, ids=str)
def test_a_boundary_moves_within_the_overlap_without_sending_weights(axes, overlap, stages, others, zero):
    """Both stages have parameters, state and buffers of these layers, in the same parts under ZeRO."""
    expected, arrays = on_one_device()
    how = {"overlap": overlap, "zero": zero}
    for losses, ours, sent in trained(axes, how | {"stages": stages}, axes, how | {"stages": others}):
        assert sent == 0
        np.testing.assert_allclose(losses, expected, rtol=1e-11)
        for name, array in arrays.items():
            np.testing.assert_allclose(ours[name], array, rtol=0, atol=1e-10, err_msg=name)


def test_parts_that_become_whole_are_sent_once_to_each_rank():
    """ZeRO-3 to replicas: parameters and both kinds of state, (n - 1) / n of each to every rank; buffers are there."""
    results = trained({"data": 2}, {"zero": 3}, {"data": 2}, {})
    names = text_model().parameters()
    size = sum(int(np.prod(shape)) for _, (_, shape) in names) * 8
    assert sum(sent for _, _, sent in results) == 3 * size


GOING_ON = {
    "three go on": ([0, 1, 3], {"data": 3}, {"zero": 1}),
    "two, in another order": ([2, 1], {"pipe": 2}, {}),
    "one": ([3], {"data": 1}, {}),
    "all, in another order": ([2, 0, 3, 1], {"pipe": 2, "model": 2}, {"zero": 1}),
}
NODES = {"one node": None, "two nodes": ["a", "b", "a", "b"]}


@pytest.mark.parametrize(
    "members, after, how, nodes",
    [
        pytest.param(
            *GOING_ON[who],
            NODES[where],
            id=f"{who}-{where}",
            marks=[] if (i, j) in ((0, 0), (1, 1)) else pytest.mark.soak,
        )
        for i, who in enumerate(GOING_ON)
        for j, where in enumerate(NODES)
    ],
)
def test_some_of_the_ranks_go_on(members, after, how, nodes):
    """From ZeRO-3 on four ranks: those that leave hand over what they alone have, and are done."""
    expected, arrays = on_one_device()

    def program():
        with Mesh(data=4) as mesh:
            engine = LayeredEngine(text_model(), mesh, dtype=np.float64, seed=5, storage=ZeroConfig(3))
            optimizer = AdamW()
            batches = lambda step: batch_of(*tokens(step), engine, MICRO_BATCHES, step)
            trainer = Trainer(engine, optimizer, batches, lambda step: 0.05, grad_clip=0.3)
            losses = [report.loss for report in trainer.run(1)]
            if mesh.rank not in members:
                engine.reshard(None, optimizer=optimizer)
                return losses, {}
            with Mesh(world().subset(members), **after) as other:
                engine.reshard(other, optimizer=optimizer, **options(other, **how))
                losses += [report.loss for report in trainer.run(3)]
                found = {name: engine.gather(name) for name in engine.names}
                found |= {name: engine.gather_buffer(name) for name in engine.buffer_names}
                for kind, state in optimizer.state.items():
                    found |= {f"{kind} of {name}": engine.gather_owned(name, state) for name in engine.names}
                return losses, found

    results = run_threads(program, 4, nodes=nodes)
    for rank, (losses, ours) in enumerate(results):
        np.testing.assert_allclose(losses, expected if rank in members else expected[:1], rtol=1e-11)
        assert not ours if rank not in members else ours.keys() == arrays.keys()
        for name, array in ours.items():
            np.testing.assert_allclose(array, arrays[name], rtol=0, atol=1e-10, err_msg=name)


def test_ranks_that_go_on_on_several_meshes_are_refused():
    def program():
        with Mesh(data=2) as mesh, Mesh(world().subset([mesh.rank])) as alone:
            engine = LayeredEngine(two_layers(4, 4), mesh)
            with pytest.raises(
                UsageError, match=r"same new mesh.*2 of 2 pass a mesh of 1 ranks, as its ranks \[0, 0\]"
            ):
                engine.reshard(alone)

    run_threads(program, 2)


def test_no_rank_holds_more_than_its_own_and_two_pieces(monkeypatch):
    """4 MB of parameters: beside the new blocks (those of the state are counted here) some pieces of 16 KiB."""
    monkeypatch.setattr("spmd_engine.engine.state.engine_state.PIECE", 1 << 14)
    n, model = 4, two_layers(512, 512)

    @contextmanager
    def program():
        with Mesh(data=n) as mesh, Mesh(model=n) as other:
            engine, optimizer = LayeredEngine(model, mesh, dtype=np.float64, storage=ZeroConfig(3)), AdamW()
            optimizer.prepare(engine)
            yield mesh, lambda: engine.reshard(other, optimizer=optimizer)

    peak = peak_of(program, n)
    parameters = sum(int(np.prod(shape)) for _, (_, shape) in model.parameters()) * 8
    assert 2 * parameters <= peak <= 2 * parameters + (1 << 20)
