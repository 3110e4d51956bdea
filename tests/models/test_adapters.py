"""LoRA: what it computes on any mesh, against the gradients of all weights; PEFT's files in and out."""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd_engine import Mesh, run_threads
from spmd_engine.axes import all_positions
from spmd_engine.checkpoints import Checkpoint, save_checkpoint
from spmd_engine.checkpoints.hf.export import export_adapters, export_huggingface
from spmd_engine.checkpoints.hf.weights import adapter_options, merged
from spmd_engine.checkpoints.pretrained import open_pretrained, with_shape
from spmd_engine.engine import AdamW
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.build import build_engine, composed_assignment, composed_layout
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.layers.moe.routing import RouterOptions
from spmd_engine.models import DecoderConfig, Mixture
from spmd_engine.models.lora import LoRAOptions
from support import tiny

SHAPE = DecoderConfig(
    family="qwen3", layers=2, width=12, heads=6, key_value_heads=2, head_width=4, hidden=10, vocabulary=13,
    qk_norm=True, context=16,
)  # fmt: skip
GPT2 = DecoderConfig(family="gpt2", layers=2, width=12, heads=3, hidden=10, vocabulary=13, context=16)
EXPERTS = DecoderConfig(
    family="qwen3-moe", layers=2, width=12, heads=6, key_value_heads=2, hidden=10, vocabulary=13, qk_norm=True,
    context=16, mixture=Mixture(experts=5, hidden=7, dense="1", router=RouterOptions(top_k=2)),
)  # fmt: skip
SHARED = EXPERTS.changed(
    family="qwen2-moe", qk_norm=False, bias=True,
    mixture=Mixture(experts=3, hidden=5, shared=2, shared_gate=True, router=RouterOptions(top_k=2)),
)  # fmt: skip
NEOX = DecoderConfig(
    family="gpt-neox", layers=2, width=12, heads=3, hidden=10, vocabulary=13, context=16, norm="layer", bias=True,
    output_bias=True, parallel="two-norms", gated=False, activation="gelu-erf", mlp_bias=True,
)  # fmt: skip
OPTIONS = LoRAOptions(rank=3, alpha=4.5)
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 4, 16))
SIDES = {"query": ("d", "hrk"), "key": ("d", "hk"), "value": ("d", "hk"), "output": ("hrk", "d"),
         "gate": ("d", "f"), "up": ("d", "f"), "down": ("f", "d"), "w0": ("d", "f"), "w1": ("f", "d")}  # fmt: skip
MESHES = [
    ({"data": 1}, {}),
    ({"model": 2}, {"sequence_parallel": True}),
    ({"model": 3}, {}),
    ({"data": 2, "context": 2}, {"zero": 2}),
    ({"pipe": 2, "data": 2}, {"zero": 3, "recompute": "block", "state_shares": "data=1:2"}),
    ({"pipe": 2, "model": 2}, {"schedule": "zero-bubble"}),
]


def values(engine, names):
    """Random, by name: also of what begins as zeros or ones."""
    found = {
        name: np.random.default_rng(sum(name.encode())).standard_normal(engine_shape(engine, name)) * 0.3
        for name in names
    }
    found["head/table"] = found["embedding/table"]  # tied
    return {name: each for name, each in found.items() if name in (*engine.names, *engine.buffer_names)}


def engine_shape(engine, name):
    described = {name: shape for name, (_, shape) in engine.model.parameters()}
    return (described | {name: shape for name, (_, shape) in engine.model.buffers()})[name]


def two_steps(axes, composition, shape=SHAPE):
    """Gradients of the first step, and losses and adapters after two; then the frozen weights."""

    def program():
        with Mesh(**axes) as mesh:
            config = ModelConfig(name="adapted", shape=shape, dtype="float64", lora=OPTIONS)
            engine = build_engine(config, mesh, ParallelConfig(mesh=axes, **composition))
            assert all("_lora_" in name for name in engine.names)
            whole = values(engine, [*engine.names, *engine.buffer_names])
            engine.load_checkpoint(whole)
            engine.after_update()
            batch, optimizer, losses = batch_of(*TOKENS, engine), AdamW(), []
            for step in (1, 2):
                losses.append(engine.step(batch))
                if step == 1:
                    gradients = {name: engine.gather_owned(name, engine.gradients) for name in engine.names}
                optimizer.update(engine, engine.gradients, step=step, rate=0.05)
            frozen = {name: engine.gather_buffer(name) for name in engine.buffer_names}
            return losses, gradients, {name: engine.gather(name) for name in engine.names}, frozen, whole

    return run_threads(program, tiny.ranks_of(axes))[0]


@cache
def alone(shape=SHAPE):
    return two_steps({"data": 1}, {}, shape)


@pytest.mark.parametrize(
    ("axes", "composition", "shape"),
    [
        (*MESHES[4], SHAPE),
        ({"model": 2, "data": 2}, {"zero": 3, "sequence_parallel": True}, GPT2),
        ({"expert": 2, "model": 2}, {"zero": 3, "sequence_parallel": True}, SHARED),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                *((*each, SHAPE) for each in (*MESHES[1:4], MESHES[5])),
                ({"pipe": 2, "expert": 3}, {"recompute": "block"}, EXPERTS),
                ({"pipe": 2, "model": 2}, {"zero": 2}, NEOX),
                ({"expert": 2, "model": 2}, {"zero": 1}, EXPERTS),
            )
        ),
    ],
    ids=lambda each: each.family if isinstance(each, DecoderConfig) else str(each) if each else "",
)
def test_every_mesh_computes_the_same(axes, composition, shape):
    losses, gradients, adapters, frozen, whole = two_steps(axes, composition, shape)
    expected_losses, *found_alone, _, _ = alone(shape)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
    for found, expected in zip((gradients, adapters), found_alone):
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-10, err_msg=name)
    for name in frozen:
        np.testing.assert_array_equal(frozen[name], whole[name])


@pytest.mark.parametrize(
    ("axes", "shape", "copies"),
    [({"data": 4}, SHAPE, 1), ({"data": 2, "replicate": 2}, SHAPE, 2), ({"expert": 2, "data": 2}, SHARED, 1)],
    ids=str,
)
def test_fully_sharded_no_frozen_number_is_stored_twice(axes, shape, copies):
    """And none stays whole after a step, nor has a gradient."""

    def program():
        with Mesh(**axes) as mesh:
            config = ModelConfig(name="adapted", shape=shape, dtype="float64", lora=OPTIONS)
            engine = build_engine(config, mesh, ParallelConfig(mesh=axes, zero=3))
            engine.load_checkpoint(values(engine, [*engine.names, *engine.buffer_names]))
            engine.step(batch_of(*TOKENS, engine))
            storages = engine.placed.frozen.storages
            assert all(each.whole_parameters is None and each.own_gradients is None for each in storages)
            return sum(each.size for each in engine.buffers.values()), engine.model

    found = run_threads(program, tiny.ranks_of(axes))
    whole = sum(np.prod(shape) for _, (_, shape) in found[0][1].buffers())
    counts = [count for count, _ in found]
    assert sum(counts) == copies * whole and max(counts) < 1.4 * sum(counts) / len(counts)


def test_frozen_weights_go_by_shares_of_state():
    config, axes = ModelConfig(name="adapted", shape=SHAPE, lora=OPTIONS), {"data": 2}
    composition = ParallelConfig(mesh=axes, zero=3, state_shares="data=1:3")
    model, stored = config.build(composition), []
    for place in all_positions(axes):
        assignment = composed_assignment(model, place, composed_layout(model, place, composition), 4, composition)
        parts = [group.intervals(2)[place.index(("data",))] for group in assignment.frozen]
        stored.append(sum(part.stop - part.start for part in parts))
    assert stored[1] == pytest.approx(3 * stored[0], rel=0.1)


@pytest.mark.parametrize("shape", [SHAPE, GPT2, NEOX, EXPERTS, SHARED], ids=lambda shape: shape.family)
def test_gradients_are_those_of_all_weights_projected(shape):
    """Of the merged model's gradient dw, da = scale dw bᵀ, summed over those who share a, and db = scale aᵀ dw."""
    _, gradients, _, _, whole = alone(shape)
    engine = build_engine(ModelConfig(name="merged", shape=shape, dtype="float64"), Mesh())
    dims = {name: parameter.dims for name, (parameter, _) in engine.model.parameters()}
    merged, names = dict(whole), OPTIONS.names(shape.family, dims)
    letters = {"hrk": "hk", "hk": "hk"} if shape in (GPT2, NEOX) else {}
    sides = {own: [letters.get(each, each) for each in pair] for own, pair in SIDES.items()}
    for name, (a, b) in names.items():
        into, out = sides[name.rpartition("/")[2]]
        merged[name] = whole[name] + 1.5 * np.einsum(f"{into}q,q{out}->{into}{out}", whole[a], whole[b])
    engine.load_checkpoint(merged)
    engine.step(batch_of(*TOKENS, engine))
    full, expected = engine.named(engine.gradients), {}
    for name, (name_of_a, name_of_b) in names.items():
        into, out = sides[name.rpartition("/")[2]]
        a, b, dw = whole[name_of_a], whole[name_of_b], full[name]
        da = 1.5 * np.einsum(f"{into}{out},q{out}->{into}q", dw, b)
        db = 1.5 * np.einsum(f"{into}q,{into}{out}->q{out}", a, dw)
        expected[name_of_a] = expected.get(name_of_a, 0) + da
        expected[name_of_b] = expected.get(name_of_b, 0) + db
    assert expected.keys() == gradients.keys()
    assert len(expected) == {"qwen3": 28, "gpt2": 20, "gpt-neox": 20, "qwen3-moe": 52, "qwen2-moe": 70}[shape.family]
    for name, each in expected.items():
        np.testing.assert_allclose(gradients[name], each, rtol=0, atol=1e-13, err_msg=name)


def test_fused_experts_with_twice_the_rank(monkeypatch):
    """Gate and up of an expert share an a, of twice the rank, on any mesh."""
    targets = "q_proj,experts.gate_up_proj,experts.down_proj"
    monkeypatch.setitem(globals(), "OPTIONS", OPTIONS.changed(targets=targets, doubled=True))
    _, *expected, _, _ = two_steps({"data": 1}, {}, EXPERTS)
    _, *found, _, _ = two_steps({"expert": 2, "model": 2}, {"zero": 1}, EXPERTS)
    assert expected[0]["block0/moe/expert0/gate_up_lora_a"].shape == (12, 6)
    for one, other in zip(expected, found, strict=True):
        for name in one:
            np.testing.assert_allclose(other[name], one[name], rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    ("name", "targets", "said"),
    [
        ("llama-nano", "w0", "'w0' of a llama has no adapter here; there are: q_proj"),
        (
            "mixtral-nano",
            "q_proj,up_proj",
            "'up_proj' of a mixtral has no adapter here; .*here are: q_proj, .*w1",
        ),
        ("mixtral-nano", "w1,experts.gate_up_proj", "experts.gate_up_proj would adapt gate of experts, which have"),
        ("gpt-nano", "q_proj", "'q_proj' of a gpt2 has no adapter here; .*here are: c_proj, c_attn, c_fc"),
        ("mlp", None, "mlp has no adapters"),
    ],
)
def test_what_has_no_adapters_is_refused(name, targets, said):
    with pytest.raises(UsageError, match=said):
        ModelConfig(name, lora=LoRAOptions(targets=targets)).build(ParallelConfig())


# --- PEFT's files

ADAPTERS = Path(__file__).parents[1] / "golden" / "adapter"
BASES = Path(__file__).parents[1] / "golden" / "decoders"
GOLDEN, BASE = ADAPTERS / "llama", BASES / "llama"


@pytest.mark.parametrize(
    ("family", "axes", "composition"),
    [
        ("llama", {"pipe": 2, "data": 2}, {"zero": 3}),
        ("gpt2", {"data": 1}, {}),
        ("phi3", {"model": 3}, {}),
        ("gpt_neox", {"data": 1}, {}),
        ("falcon_grouped", {"model": 2}, {}),
        ("qwen3_moe", {"expert": 2}, {}),
        ("mixtral", {"data": 1}, {}),
        pytest.param("llama", {"data": 1}, {}, marks=pytest.mark.soak),
        pytest.param("falcon_grouped", {"model": 2, "queries": 2}, {}, marks=pytest.mark.soak),
        pytest.param("mixtral", {"expert": 2, "model": 2}, {}, marks=pytest.mark.soak),
        pytest.param("olmoe", {"expert": 3}, {"zero": 3}, marks=pytest.mark.soak),
    ],
    ids=lambda each: str(each) if each else "",
)
def test_what_peft_wrote_and_what_is_written_for_it(family, axes, composition, tmp_path):
    """scripts/make_golden_adapter.py made the adapter, and the logits of the model with it."""
    golden, base = ADAPTERS / family, BASES / family
    expected = dict(np.load(golden / "reference.npz"))

    def program():
        with Mesh(**axes) as mesh:
            config = with_shape(ModelConfig(str(base), dtype="float64", adapter=str(golden)), mesh.group())
            engine, _ = open_pretrained(config, mesh, ParallelConfig(mesh=axes, **composition))
            with engine.inference():
                y = engine.forward(expected["tokens"][engine.batch_span(2)])
            save_checkpoint(tmp_path / "run", engine)
            arrays, group = Checkpoint(tmp_path / "run"), mesh.group()
            export_adapters(arrays, config.shape, config.lora, tmp_path / "peft", group, base=config.path)
            whole = merged(arrays, config.shape, config.lora)
            export_huggingface(whole, config.shape, tmp_path / "merged", group, dtype="float64")
            return None if y is None else engine.join_outputs(y)

    for logits in run_threads(program, tiny.ranks_of(axes)):
        if logits is not None:
            np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-10)
    found, original = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "peft", golden))
    assert found.keys() == original.keys()
    for name in original:
        np.testing.assert_array_equal(found[name], original[name], err_msg=name)
    assert adapter_options(tmp_path / "peft") == adapter_options(golden)
    engine, _ = open_pretrained(ModelConfig(str(tmp_path / "merged"), dtype="float64"), Mesh())
    with engine.inference():
        np.testing.assert_allclose(engine.forward(expected["tokens"]), expected["logits"], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"target_parameters": ["mlp.gate.weight"]}, "target_parameters has 'mlp.gate.weight', which is not"),
        ({"rank_pattern": {"v_proj": 4}}, "rank_pattern is {'v_proj': 4}, which is not supported"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"layers_to_transform": 0}, "layers_to_transform is 0, which is not supported"),
        ({"layers_to_transform": [0]}, r"layers_to_transform is \[0\], which is not supported"),
        ({"new_scale": 2.0}, "new_scale is 2.0, which is not supported"),
        ({"use_rslora": "no"}, "use_rslora is 'no'; it must be true or false"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16', .*: PiSSA changed the base"),
        ({"init_lora_weights": "olora"}, "OLoRA changed the base weights.* path_initial_model_for_weight_conversion="),
        ({"init_lora_weights": "corda"}, "CorDA changed the base weights.* path_initial_model_for_weight_conversion="),
        ({"init_lora_weights": "lora_ga"}, "LoRA-GA changed the base weights"),
        ({"init_lora_weights": "loftq"}, r"LoftQ changed the base weights.* Convert it by merge_and_unload\(\)"),
        ({"init_lora_weights": "made up"}, "init_lora_weights is 'made up', which is not supported$"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head' of a llama has no adapter here"),
        ({"r": 4}, r"lora_A.weight is \[3, \d+\], but the model's configuration says \[4, "),
        ({"target_modules": ["q_proj"]}, "nothing of a llama with these adapters is called"),
    ],
    ids=str,
)
def test_adapters_that_are_not_known_here(values, said, tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(UsageError, match=said):
        open_pretrained(ModelConfig(str(BASE), adapter=str(tmp_path / "adapter")), Mesh())


def test_fields_without_effect_may_have_any_value(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    harmless = {"lora_dropout": 0.1, "layers_pattern": "h", "init_lora_weights": "gaussian", "eva_config": {"rho": 2}}
    harmless |= {"layers_to_transform": [], "exclude_modules": [], "loftq_config": {"loftq_bits": 4}}
    path.write_text(json.dumps(json.loads(path.read_text()) | harmless))
    assert adapter_options(tmp_path / "adapter") == adapter_options(GOLDEN)
