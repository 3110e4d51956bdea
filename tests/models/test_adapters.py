"""LoRA: what it computes on any mesh, against the gradients of all weights; PEFT's files in and out."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import tiny
from spmd_engine import Mesh, run
from spmd_engine.checkpoints import Checkpoint, save_checkpoint
from spmd_engine.checkpoints.export_huggingface import export_adapters, export_huggingface
from spmd_engine.checkpoints.peft import Merged, adapter_options
from spmd_engine.checkpoints.pretrained import open_pretrained, with_shape
from spmd_engine.engine import AdamW
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.composition import Composition, ModelConfig, build_engine
from spmd_engine.errors import UsageError
from spmd_engine.models import DecoderShape
from spmd_engine.models.adapters import LoRAOptions

SHAPE = DecoderShape(
    family="qwen3", layers=2, width=12, heads=6, key_value_heads=2, head_width=4, hidden=10, vocabulary=13,
    query_key_norm=True, context=16,
)  # fmt: skip
OPTIONS = LoRAOptions(rank=3, alpha=4.5)
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 4, 16))
SIDES = {"query": ("d", "hrk"), "key": ("d", "hk"), "value": ("d", "hk"), "output": ("hrk", "d"),
         "gate": ("d", "f"), "up": ("d", "f"), "down": ("f", "d")}  # fmt: skip
MESHES = [
    ({"data": 1}, {}),
    ({"model": 2}, {"sequence_parallel": True}),
    ({"model": 3}, {}),
    ({"data": 2, "context": 2}, {"zero": 2}),
    ({"pipe": 2, "data": 2}, {"zero": 3, "recompute": "block"}),
    ({"pipe": 2, "model": 2}, {"schedule": "zero-bubble"}),
]


def values(engine, names):
    """Random, by name: also of what begins as zeros or ones."""
    found = {
        name: np.random.default_rng(sum(name.encode())).standard_normal(engine_shape(engine, name)) * 0.3
        for name in names
    }
    found["head/table"] = found["embedding/table"]  # tied
    return found


def engine_shape(engine, name):
    described = {name: shape for name, (_, shape) in engine.model.parameters()}
    return (described | {name: shape for name, (_, shape) in engine.model.buffers()})[name]


def two_steps(axes, composition):
    """Gradients of the first step, and losses and adapters after two; then the frozen weights."""

    def program():
        with Mesh(**axes) as mesh:
            config = ModelConfig(name="adapted", shape=SHAPE, dtype="float64", lora=OPTIONS)
            engine = build_engine(config, mesh, Composition(mesh=axes, **composition))
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

    return run(program, tiny.ranks_of(axes))[0]


@pytest.fixture(scope="module")
def alone():
    return two_steps({"data": 1}, {})


@pytest.mark.parametrize(("axes", "composition"), MESHES[1:], ids=lambda each: str(each) if each else "")
def test_every_mesh_computes_the_same(alone, axes, composition):
    losses, gradients, adapters, frozen, whole = two_steps(axes, composition)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-12)
    for found, expected in ((gradients, alone[1]), (adapters, alone[2])):
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-10, err_msg=name)
    for name in frozen:
        np.testing.assert_array_equal(frozen[name], whole[name])


def test_gradients_are_those_of_all_weights_projected(alone):
    """Of the merged model's gradient dw, da = scale dw bᵀ and db = scale aᵀ dw."""
    _, gradients, _, _, whole = alone
    engine = build_engine(ModelConfig(name="merged", shape=SHAPE, dtype="float64"), Mesh())
    merged = dict(whole)
    for name in engine.names:
        own = name.rpartition("/")[2]
        if own in SIDES:
            into, out = SIDES[own]
            product = np.einsum(f"{into}q,q{out}->{into}{out}", whole[name + "_lora_a"], whole[name + "_lora_b"])
            merged[name] = whole[name] + 1.5 * product
    engine.load_checkpoint(merged)
    engine.step(batch_of(*TOKENS, engine))
    full = engine.named(engine.gradients)
    compared = 0
    for name in engine.names:
        own = name.rpartition("/")[2]
        if own not in SIDES:
            continue
        into, out = SIDES[own]
        a, b, dw = whole[name + "_lora_a"], whole[name + "_lora_b"], full[name]
        da = 1.5 * np.einsum(f"{into}{out},q{out}->{into}q", dw, b)
        db = 1.5 * np.einsum(f"{into}q,{into}{out}->q{out}", a, dw)
        np.testing.assert_allclose(gradients[name + "_lora_a"], da, rtol=0, atol=1e-13)
        np.testing.assert_allclose(gradients[name + "_lora_b"], db, rtol=0, atol=1e-13)
        compared += 1
    assert compared == 14


def test_what_has_no_adapters_is_refused():
    with pytest.raises(UsageError, match="'w0' has no adapter here; those that can are q_proj"):
        LoRAOptions(targets="w0")
    for name, said in (("mixtral-nano", "block0/moe has experts"), ("gpt-nano", "LoRA is for Llama's kin")):
        with pytest.raises(UsageError, match=said):
            ModelConfig(name, lora=OPTIONS).build(Composition())


# --- PEFT's files

GOLDEN = Path(__file__).parents[1] / "golden" / "adapter"
BASE = Path(__file__).parents[1] / "golden" / "decoders" / "llama"


@pytest.mark.parametrize(
    ("axes", "composition"),
    [({"data": 1}, {}), ({"model": 3}, {}), ({"pipe": 2, "data": 2}, {"zero": 3})],
    ids=lambda each: str(each) if each else "",
)
def test_what_peft_wrote_and_what_is_written_for_it(axes, composition, tmp_path):
    """scripts/make_golden_adapter.py made the adapter, and the logits of the model with it."""
    expected = dict(np.load(GOLDEN / "reference.npz"))

    def program():
        with Mesh(**axes) as mesh:
            config = with_shape(ModelConfig(str(BASE), dtype="float64", adapter=str(GOLDEN)), mesh.group())
            engine, _ = open_pretrained(config, mesh, Composition(mesh=axes, **composition))
            with engine.inference():
                y = engine.forward(expected["tokens"][engine.batch_span(2)])
            save_checkpoint(tmp_path / "run", engine)
            arrays, group = Checkpoint(tmp_path / "run"), mesh.group()
            export_adapters(arrays, config.shape, config.lora, tmp_path / "peft", group, base=config.path)
            merged = Merged(arrays, config.shape, config.lora)
            export_huggingface(merged, config.shape, tmp_path / "merged", group, dtype="float64")
            return None if y is None else engine.join_outputs(y)

    for logits in run(program, tiny.ranks_of(axes)):
        if logits is not None:
            np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-10)
    found, original = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "peft", GOLDEN))
    assert found.keys() == original.keys()
    for name in original:
        np.testing.assert_array_equal(found[name], original[name], err_msg=name)
    assert adapter_options(tmp_path / "peft") == adapter_options(GOLDEN)
    engine, _ = open_pretrained(ModelConfig(str(tmp_path / "merged"), dtype="float64"), Mesh())
    with engine.inference():
        np.testing.assert_allclose(engine.forward(expected["tokens"]), expected["logits"], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not known here"),
        ({"use_dora": True}, "use_dora is True, a feature that is not known here"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head' has no adapter here"),
        ({"r": 4}, r"lora_A.weight is \[3, 12\], but the model's configuration says \[4, 12\]"),
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
