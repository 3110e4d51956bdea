"""What a step will send, call by call and byte by byte, is what it sends: every strategy, model and mesh."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spmd_engine.axes import parse_axes
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.layers import Embedding, Head, Layer, LayerNorm, Parameter, Residual
from spmd_engine.models import DecoderConfig, Model, gpt
from spmd_engine.models.convnet import ImageShape, convnet
from spmd_engine.models.decoder import decoder, token_loss
from spmd_engine.models.lora import LoRAOptions, with_adapters
from spmd_engine.models.mlp import deep_mlp, mlp, two_layers
from spmd_engine.planning import analyze
from support import tiny
from support.pairwise import in_turn
from support.real_steps import ledgers

LAYERS = Path(__file__).parents[2] / "docs" / "layers.md"
GPT, GPT_OF_TWO = gpt(replace(tiny.SIZE, layers=3)), gpt(tiny.SIZE)
GPT_RING = gpt(tiny.SIZE, context_method="ring")
GPT_ULYSSES = gpt(tiny.SIZE, context_method="ulysses")
GPT_UNTIED = gpt(replace(tiny.SIZE, tied=False))
GPT_SHARED_KEYS = gpt(replace(tiny.SIZE, key_value_heads=2))
MLP, DEEP, TWO = mlp((12, 7, 9, 5)), deep_mlp(4, 6), two_layers(6, 10)
ADAPTED = with_adapters(
    decoder(DecoderConfig(layers=2, width=12, heads=3, hidden=20, vocabulary=13, context=8)),
    LoRAOptions(rank=2),
    "llama",
)
CONVNET = convnet(ImageShape(), "convnet")

CASES = [
    (GPT_OF_TWO, "data=3", {"zero": 3, "group_threshold": 1500, "recompute": "block"}),
    (GPT_OF_TWO, "model=3", {"shares": "model=2:0:1", "sequence_parallel": True, "recompute": "attention"}),
    (GPT_OF_TWO, "data=2,model=2", {"shares": "model=1:5", "zero": 2}),  # which shards are uneven depends on model
    (GPT_OF_TWO, "data=2,pipe=2,model=1|2", {"zero": 3, "sequence_parallel": True}),
    (GPT, "pipe=3", {"overlap_layers": "2", "group_threshold": 500}),
    (CONVNET, "pipe=2,data=2", {"overlap_layers": "2", "zero": 1}),
    (ADAPTED, "data=2,model=2", {"zero": 3, "group_threshold": 1500}),
    (MLP, "row=2,col=2", {}),
    (CONVNET, "rows=2", {"zero": 1}),
]
MORE = [
    (GPT, "data=3", {"zero": 1, "compress": "bfloat16"}),
    (GPT, "context=2", {"zero": 3}),
    (GPT, "pipe=3,model=2|1|2", {"schedule": "zero-bubble"}),
    (DEEP, "pipe=2,model=2", {}),
    (GPT, "data=2", {"compress": "top-k:0.1"}),
    (GPT_UNTIED, "model=3", {"sequence_parallel": True}),
    (GPT, "pipe=2,data=2", {"schedule": "interleaved", "zero": 3}),
    (GPT, "pipe=2,data=2", {"overlap_layers": "1", "zero": 3}),
    (GPT, "data=2", {}),
    (GPT, "data=4", {"zero": 2}),
    (GPT, "replicate=2,data=2", {"zero": 1, "group_threshold": 0}),
    (GPT, "pipe=2,data=2,model=2", {"shares": "model=1:5", "zero": 2}),
    (GPT, "pipe=2,data=3", {"overlap_layers": "1", "zero": 3}),
    (GPT, "replicate=2,shard=2", {}),
    (GPT, "pipe=3", {"zero": 1, "schedule": "zero-bubble"}),
    (CONVNET, "data=2", {}),
    (GPT, "data=1", {}),
    (GPT, "replicate=2,data=4", {"zero": 1, "group_threshold": 0}),
    (GPT, "data=3", {"zero": 1}),
    (GPT, "data=2", {"zero": 3, "recompute": "block"}),
    (GPT, "data=3", {"compress": "powersgd:2"}),
    (GPT, "data=2,shard=2", {"zero": 2}),
    (GPT, "model=2", {}),
    (GPT, "model=4", {"sequence_parallel": True}),
    (GPT_UNTIED, "model=3,data=2", {"zero": 1, "sequence_parallel": True}),
    (GPT_SHARED_KEYS, "model=3", {}),
    (GPT_SHARED_KEYS, "model=3,data=2", {"shares": "model=1:1:0,data=2:1", "zero": 3}),
    (GPT, "context=2", {}),
    (GPT, "context=3", {"zero": 3}),
    (GPT_RING, "context=3,data=2", {"context_method": "ring"}),
    (GPT_ULYSSES, "context=2,model=2", {"context_method": "ulysses"}),
    (GPT, "pipe=2", {}),
    (GPT, "pipe=3,data=2", {"zero": 1, "schedule": "zero-bubble"}),
    (GPT, "pipe=2,model=2", {"schedule": "gpipe", "recompute": "attention"}),
    (GPT, "pipe=2,context=2,model=2", {"zero": 3, "recompute": "block"}),
    (MLP, "data=2", {}),
    (TWO, "model=2,data=2", {"zero": 3}),
    (CONVNET, "rows=2,columns=2", {}),
    (CONVNET, "rows=3,data=2", {"zero": 1}),
    (CONVNET, "model=2,pipe=2", {}),
    (CONVNET, "rows=2,model=2", {"shares": "rows=1:2,model=3:1"}),
]


def case_id(case):
    model, mesh, options = case
    return " ".join((model.name, mesh, *(f"{key}={value}" for key, value in options.items())))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_step_sends_what_was_predicted(case):
    model, mesh, options = case
    axes, composition = parse_axes(mesh), ParallelConfig(**options)
    how = {"batch_size": tiny.BATCH, "micro_batches": 2, "dtype": np.float64}
    real = ledgers(model, axes, composition, **how)
    predicted = analyze(model, axes, composition, every=True, **how)
    for rank, ledger in enumerate(real):
        assert predicted.of_rank(rank).ledger() == ledger, f"rank {rank}"
    merged = analyze(model, axes, composition, **how)
    assert merged.bytes_sent == sum(sent for ledger in real for _, _, sent in ledger.values())
    assert merged.calls == sum(calls for ledger in real for calls, _, _ in ledger.values())


def causal():
    """The model of docs/layers.md whose layers read positions of other ranks."""
    blocks = re.findall(r"^```python\n(.*?)^```", LAYERS.read_text(), re.MULTILINE | re.DOTALL)
    names = {"np": np, "Layer": Layer, "Parameter": Parameter}
    exec(next(block for block in blocks if "class CausalConvolution" in block), names)
    layers = [("embedding", Embedding(13, 6)), ("convolution", Residual(LayerNorm(6), names["CausalConvolution"](6)))]
    layers.append(("head", Head(13, 6)))
    return Model("causal", tuple(layers), "b s", "b s v", "b s", token_loss(13), context=8, vocabulary=13)


@in_turn(
    2, composition={"plain": None, "zero=3": ParallelConfig(zero=3)}, axes=[{"context": 2}, {"context": 3, "data": 2}]
)
def test_layers_of_a_users_own_send_what_was_predicted(axes, composition):
    model, how = causal(), {"batch_size": 4, "micro_batches": 2, "dtype": np.float64}
    predicted = analyze(model, axes, composition, every=True, **how)
    for rank, ledger in enumerate(ledgers(model, axes, composition, **how)):
        assert predicted.of_rank(rank).ledger() == ledger, f"rank {rank}"


def test_without_a_composition_a_model_is_sharded_as_by_its_engine():
    """In consecutive positions, where a rank's queries see more keys than the other's; composed, in a zigzag."""
    how = {"batch_size": 2, "every": True}
    plain, composed = (
        [analyze(GPT_RING, {"context": 2}, each, **how).of_rank(rank).flops for rank in range(2)]
        for each in (None, ParallelConfig())
    )
    assert plain[1] - plain[0] > 2 * abs(composed[1] - composed[0])


@pytest.mark.parametrize(
    ("batch_size", "micro_batches"), [(3, 2), pytest.param(1, 2, marks=pytest.mark.soak)], ids=["uneven", "empty"]
)
def test_resharding_of_micro_batches_of_several_sizes(batch_size, micro_batches):
    """After the reshard rank 0 has a sample of each micro-batch, and others have none of the last: ranks differ."""
    model = convnet(ImageShape(), "convnet", channels=(4, 4), reshard_after=1)
    axes, how = {"rows": 2}, {"batch_size": batch_size, "micro_batches": micro_batches, "dtype": np.float64}
    predicted = analyze(model, axes, ParallelConfig(), **how)
    for rank, ledger in enumerate(ledgers(model, axes, ParallelConfig(), **how)):
        assert predicted.of_rank(rank).ledger() == ledger, f"rank {rank}"


@pytest.mark.soak
@pytest.mark.parametrize("case", MORE, ids=case_id)
def test_more_steps_send_what_was_predicted(case):
    test_a_step_sends_what_was_predicted(case)
