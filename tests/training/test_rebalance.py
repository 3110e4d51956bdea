"""Experts move to where there is room while a training goes on, and it computes what it would have."""

from types import SimpleNamespace

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import AdamW
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.sharding.experts import imbalance
from spmd_engine.training import Trainer
from spmd_engine.training.expert_load import ExpertLoad, Rebalancer
from support import routed, tiny


def losses(axes, every=0):
    def program():
        with Mesh(**axes) as mesh:
            engine, optimizer = routed.engine_on(mesh, routed.model(), zero=1), AdamW()
            batches = lambda step: tiny.batch(engine, step, 2)
            trainer = Trainer(engine, optimizer, batches, lambda step: 0.05, grad_clip=0.3)
            rebalancer = Rebalancer(ParallelConfig(zero=1, rebalance_every=every))
            rebalancer.during(SimpleNamespace(engine=engine, trainer=trainer, moving=False), 5)
            found, uneven = [], []
            for report in trainer.run(5):
                found += [report.loss, report.grad_norm]
                loads = {name[:-5]: load for name, load in engine.side_outputs.items() if name.endswith("/load")}
                parts = mesh.axes.get("expert", 1)
                where = {layer: engine.layout.parts(layer, "e", len(load), mesh) for layer, load in loads.items()}
                uneven.append(max(imbalance(where[layer], load, parts) for layer, load in loads.items()))
                rebalancer.between_steps(report.step, False)
            return found, uneven, rebalancer.moves

    return run_threads(program, tiny.ranks_of(axes))


def test_experts_move_and_nothing_else_changes():
    staying, moving = losses({"expert": 3}), losses({"expert": 3}, every=2)
    ((alone, _, _),) = losses({"data": 1})
    for found, _, moves in moving:
        np.testing.assert_allclose(found, alone, rtol=1e-9)
        assert moves == moving[0][2] > 0
    assert moving[0][1][2] < staying[0][1][2]  # the step after the first move


def test_the_load_of_a_step_in_few_numbers():
    side_outputs = {
        "block0/moe/load": [6.0, 2.0, 0.0, 0.0],
        "block0/moe/dropped": 3.0,
        "block0/moe/entropy": np.log(4) / 2,
        "block1/moe/load": [2.0, 2.0, 2.0, 2.0],
        "block1/moe/dropped": 6.0,
        "block1/moe/entropy": np.log(4),
        "block1/moe/balance": 0.01,
    }
    load = ExpertLoad.of(side_outputs)
    assert (load.pairs, load.dropped, load.heaviest, load.where) == (16, 9, 3.0, "block0/moe expert 0")
    assert load.drops_most and abs(load.entropy - 0.75) < 1e-12
    assert "9 of 16 choices dropped" in str(load)
    assert ExpertLoad.of({"other/loss": 1.0}) is None and ExpertLoad.of(None) is None
