"""Against PyTorch: vectors that scripts/make_golden_resnet.py made with independent residual networks."""

from pathlib import Path

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import SGD, LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.models import ImageShape, resnet
from spmd_engine.training import Trainer
from support.pairwise import in_turn

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "resnet_tiny.npz"))
SHAPE = ImageShape(17, 14, 3, 5)
NETWORKS = {"basic": {"bottleneck": False, "large": True}, "bottleneck": {"bottleneck": True, "large": False}}
CASES = [
    ("basic", {"data": 1}),
    ("basic", {"rows": 3}),
    ("bottleneck", {"data": 1}),
    ("bottleneck", {"model": 2, "columns": 2}),
]


def part(prefix):
    return {name.removeprefix(prefix): value for name, value in GOLDEN.items() if name.startswith(prefix)}


@in_turn(2, **{"name, axes": CASES})
def test_three_steps(name, axes):
    """Losses, the first gradients, then parameters and running statistics, and what these give in evaluation."""

    def program():
        with Mesh(**axes) as mesh:
            model = resnet(SHAPE, name, blocks=(1, 2), width=3, **NETWORKS[name])
            engine = LayeredEngine(model, mesh, dtype=np.float64)
            engine.load_checkpoint(part(f"{name}/initial/") | fresh_buffers(model))
            batches = lambda step: batch_of(GOLDEN["inputs"], GOLDEN["targets"], engine, 2, step)
            engine.step(batches(0))
            gradients = {each: engine.gather_owned(each, engine.gradients) for each in engine.names}
            trainer = Trainer(engine, SGD(momentum=0.9), batches, lambda step: 0.1, grad_clip=None)
            losses = [report.loss for report in trainer.run(3)]
            final = {each: engine.gather(each) for each in engine.names}
            final |= {each: engine.gather_buffer(each) for each in engine.buffer_names}
            with engine.inference():
                micro = batch_of(GOLDEN["inputs"], GOLDEN["targets"], engine).micro_batches[0]
                scores = engine.join_outputs(engine.forward(micro.inputs))
            return losses, gradients, final, scores

    losses, gradients, final, scores = run_threads(program, int(np.prod(list(axes.values()))))[0]
    np.testing.assert_allclose(losses, GOLDEN[f"{name}/losses"], rtol=1e-11)
    assert_all_close(gradients, part(f"{name}/gradient/"))
    assert_all_close(final, part(f"{name}/final/"))
    np.testing.assert_allclose(scores, GOLDEN[f"{name}/scores"], rtol=0, atol=1e-9)


def fresh_buffers(model):
    return {name: np.full(shape, buffer.initial) for name, (buffer, shape) in model.buffers()}


def assert_all_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-9, err_msg=name)
