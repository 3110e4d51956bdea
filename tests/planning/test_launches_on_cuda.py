"""Launches and waits of a step on the stand-in for CuPy are those that the dry run counts."""

import numpy as np

from spmd_engine import Mesh, batch_of
from spmd_engine.arrays.meta.backend import DeviceShapes
from spmd_engine.arrays.precision import dtype_of
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.layers import RouterOptions
from spmd_engine.models import DecoderConfig, GPTSize, Mixture, gpt
from spmd_engine.models.convnet import ImageShape, resnet
from spmd_engine.planning import analyze
from spmd_engine.training import Trainer
from support.fake_cupy import events
from support.pairwise import in_turn


def of_text(family, layers, **options):
    shape = DecoderConfig(
        width=24,
        heads=12,
        key_value_heads=4,
        head_width=2,
        hidden=14,
        layers=layers,
        vocabulary=13,
        context=16,
        **options,
    )
    return ModelConfig(name=family, shape=shape), (2, 16), (2, 16)


#: The model, its inputs and targets; the most launches, waits, and arrays copied to the device. Fused attention takes
#: as many launches for two samples as for any number.
GPT2_STEP = lambda batch: (gpt(GPTSize(3, 24, 12, 16, 13), dropout=0.1), (batch, 16), (batch, 16))


COUNTS = {
    "gpt2": (lambda: GPT2_STEP(2), 318, 2, 3),
    "gpt2 without fused attention": (lambda: GPT2_STEP(16), 442, 2, 3),
    "llama": (lambda: of_text("llama", 4), 335, 2, 3),
    # Experts chosen in turn, as the dry run assumes; a wait of each layer, and one for side outputs.
    "moe": (
        lambda: of_text("olmoe", 4, mixture=Mixture(8, 0, 7, router=RouterOptions(routing="balanced"))),
        1037,
        2 + 4 + 1,
        3,
    ),
    "resnet18": (
        lambda: (resnet(ImageShape(32, 32, 3, 10), "resnet18", blocks=(2, 2, 2, 2), width=4), (4, 32, 32, 3), (4,)),
        1000,
        2,
        4,  # the targets twice: for the loss, and for the accuracy
    ),
}


@in_turn(2, name=list(COUNTS), dtype=["float32", "bfloat16"])
def test_a_step_launches_and_waits_as_often_as_the_dry_run_counts(name, dtype, cuda, monkeypatch):
    make, launches, waits, copies = COUNTS[name]
    model, inputs, targets = make()
    if name.endswith("without fused attention"):
        # At batch 16 x 1,024 the parts of attention are those of 16 tokens in a work space that is as much smaller.
        monkeypatch.setattr(cuda.kernels, "flash_attention", None)
        monkeypatch.setenv("SPMD_FLASH_ATTENTION", "0")  # in the dry run
        monkeypatch.setattr(cuda, "workspace", int(cuda.workspace * (16 / 1024) ** 2))
    monkeypatch.setattr(DeviceShapes, "workspace", cuda.workspace)
    with Mesh() as mesh:
        if isinstance(model, ModelConfig):
            engine = build_engine(model.changed(dtype=dtype), mesh, device="cuda")
        else:
            engine = LayeredEngine(model, mesh, backend=cuda, dtype=dtype_of(dtype))
        rng = np.random.default_rng(0)
        x = rng.integers(0, 10, inputs) if len(inputs) == 2 else rng.standard_normal(inputs).astype(np.float32)
        y = rng.integers(0, 10, targets)
        batches = lambda step: batch_of(x, y, engine, 1, step)
        trainer = Trainer(engine, AdamW(), batches, lambda step: 1e-3, grad_clip=1.0)
        trainer.step()
        events().clear()
        trainer.step()
        counted = len(events().launches), events().syncs, events().count("from_host")
    assert counted[1:] == (waits, copies)
    assert counted[0] <= launches * (1 if dtype == "float32" else 1.6)
    sequence = inputs[1] if len(inputs) == 2 else None
    planned = analyze(model, {"data": 1}, batch_size=inputs[0], sequence=sequence, device="cuda", dtype=dtype)
    step = planned.classes[0].step
    assert (step.waits, step.copies) == counted[1:]
    assert abs(step.launches - counted[0]) <= (4 if (name, dtype) == ("resnet18", "bfloat16") else 0)
