"""Against PyTorch: a block with experts, which scripts/make_golden_moe.py computed by another way."""

from pathlib import Path

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.layers import LayerNorm, MoE, Residual, RouterOptions
from spmd_engine.losses import mean_squared_error
from spmd_engine.models import Model
from spmd_engine.training import Trainer

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "moe_block.npz"))
D, F, E = 6, 7, 5


def model():
    moe = MoE(D, F, E, RouterOptions(balance_loss=0.1, z_loss=0.05), shared=1)
    return Model(
        "block", (("moe", Residual(LayerNorm(D), moe)),), "b s d", "b s d", "b s d", mean_squared_error, context=0
    )


def part(prefix):
    return {f"moe/{name.removeprefix(prefix)}": each for name, each in GOLDEN.items() if name.startswith(prefix)}


@pytest.mark.parametrize("axes", [{"data": 1}, {"expert": 3}, {"expert": 2, "model": 2}], ids=str)
def test_three_steps_are_those_of_pytorch(axes):
    def program():
        with Mesh(**axes) as mesh:
            engine = LayeredEngine(model(), mesh, dtype=np.float64)
            engine.load_checkpoint(part("initial/"))
            batch = batch_of(GOLDEN["x"], GOLDEN["targets"], engine)
            y = engine.join_outputs(engine.forward(batch.micro_batches[0].inputs))
            np.testing.assert_allclose(y, GOLDEN["y"], rtol=0, atol=1e-12)
            trainer = Trainer(engine, AdamW(betas=(0.9, 0.95), weight_decay=0.1), lambda step: batch, lambda step: 0.05)
            for step, report in enumerate(trainer.run(3)):
                np.testing.assert_allclose(report.loss, GOLDEN["losses"][step], rtol=1e-12)
                np.testing.assert_array_equal(engine.side_outputs["moe/load"], GOLDEN["load"][step])
                for name, gradient in part("gradient/").items() if step == 0 else ():
                    ours = engine.gather_owned(name, engine.gradients)
                    np.testing.assert_allclose(ours, gradient, rtol=0, atol=1e-12, err_msg=name)
            for name, value in part("final/").items():
                np.testing.assert_allclose(engine.gather(name), value, rtol=0, atol=1e-10, err_msg=name)

    run_threads(program, int(np.prod(list(axes.values()))))
