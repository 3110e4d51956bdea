"""Against PyTorch: vectors that scripts/make_golden.py made with an independent GPT-2."""

from pathlib import Path

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import AdamW, Batch, LayeredEngine, MicroBatch
from spmd_engine.models import GPTSize, gpt
from support.pairwise import in_turn

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "gpt2_tiny.npz"))
HYPER = {name.removeprefix("hyper/"): value.item() for name, value in GOLDEN.items() if name.startswith("hyper/")}
MESHES = [{"data": 1}, {"data": 3}, {"model": 3}, {"data": 2, "model": 2}]


def part(prefix):
    return {name.removeprefix(prefix): value for name, value in GOLDEN.items() if name.startswith(prefix)}


def on_mesh(axes, dtype, program):
    """``program(engine, batch)`` on every rank, the engine loaded with the golden initial parameters."""

    def body():
        with Mesh(**axes) as mesh:
            shape = (HYPER[k] for k in ("layers", "width", "heads", "context", "vocabulary"))
            engine = LayeredEngine(gpt(GPTSize(*shape)), mesh, dtype=dtype)
            engine.load_checkpoint(part("initial/"))
            rows = engine.batch_span(len(GOLDEN["tokens"]))
            micro = MicroBatch(*(GOLDEN[name][rows] for name in ("tokens", "targets")), mask=GOLDEN["mask"][rows])
            return program(engine, Batch([micro]))

    return run_threads(body, int(np.prod(list(axes.values()))))


def gathered(engine, arrays):
    return {name: engine.sharding(name).gather(array, engine.mesh) for name, array in arrays.items()}


@in_turn(2, **{"bits, tolerance": [(32, 1e-6), (64, 1e-13)]}, axes=MESHES)
def test_logits_loss_and_every_gradient(axes, bits, tolerance):
    def program(engine, batch):
        with engine.inference():
            logits = engine.forward(batch.micro_batches[0].inputs)
        logits = engine.all_gather(logits, 2, over="model") if "model" in axes else logits
        logits = engine.all_gather(logits, 0, over="data") if "data" in axes else logits
        loss = engine.step(batch)
        return logits, loss, gathered(engine, engine.named(engine.gradients))

    expected = part(f"gradient{bits}/")
    # One scale for all gradients: that of a key's bias is zero but for rounding, and float32 PyTorch itself
    # is up to 1.7e-6 of a single parameter's largest entry away from float64.
    scale = max(abs(g).max() for g in expected.values())
    for logits, loss, gradients in on_mesh(axes, f"float{bits}", program):
        golden = GOLDEN[f"logits{bits}"]
        np.testing.assert_allclose(logits, golden, rtol=0, atol=tolerance * abs(golden).max())
        np.testing.assert_allclose(loss, GOLDEN[f"loss{bits}"], rtol=tolerance)
        assert set(gradients) == set(expected)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=tolerance * scale, err_msg=name)


@in_turn(2, axes=MESHES)
def test_ten_adamw_steps(axes):
    def program(engine, batch):
        optimizer = AdamW((HYPER["beta1"], HYPER["beta2"]), HYPER["epsilon"], HYPER["weight_decay"])
        losses, norms = [], []
        for step in range(HYPER["steps"]):
            losses.append(engine.step(batch))
            norms.append(engine.gradient_norm())
            scale = min(1.0, HYPER["clip_norm"] / (norms[-1] + 1e-6))
            optimizer.update(engine, engine.gradients, step=step + 1, rate=HYPER["learning_rate"], scale=scale)
        return losses, norms, gathered(engine, engine.parameters)

    for losses, norms, parameters in on_mesh(axes, "float64", program):
        np.testing.assert_allclose(losses, GOLDEN["losses"], rtol=1e-10)
        np.testing.assert_allclose(norms, GOLDEN["norms"], rtol=1e-10)
        for name, golden in part("final/").items():
            # A key's bias moves by Adam's quotient of rounding noise.
            atol = 1e-9 if name.endswith("key_bias") else 1e-10
            np.testing.assert_allclose(parameters[name], golden, rtol=0, atol=atol, err_msg=name)
