"""Models by path at the command line: trained with adapters, exported, answering, and compared with a reference."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from spmd_engine.checkpoints.hf.weights import Pretrained
from spmd_engine.formats.gguf import BlockedTensor
from support.command_line import QUIET, TEXT

GOLDEN = Path(__file__).parents[1] / "golden"
ADAPTER = GOLDEN / "adapter" / "llama"
FOLDERS = GOLDEN / "decoders"
LLAMA = FOLDERS / "llama"


def test_a_reference_is_met_or_the_first_layer_named(here, tmp_path):
    known = np.load(LLAMA / "reference.npz")
    np.savez(tmp_path / "right.npz", tokens=known["tokens"], logits=known["logits64"])
    np.savez(tmp_path / "wrong.npz", tokens=known["tokens"], logits=known["logits64"] + 1)
    code, out, _ = here("verify", "--import", str(LLAMA), "--reference", str(tmp_path / "right.npz"))
    assert code == 0 and "all 1 agree to 0.0001" in out
    code, out, _ = here("verify", "--import", str(LLAMA), "--reference", str(tmp_path / "wrong.npz"))
    assert code == 1 and "head is the first that differs" in out and "It has lm_head.weight" in out
    code, _, error = here("verify", "--import", str(LLAMA))
    assert code == 2 and "go together; give both" in error


def test_inspect_lists_sharding_of_each_tensor(here):
    code, out, _ = here("inspect", "--model", str(LLAMA), "--mesh", "model=2")
    assert code == 0 and "model.layers.*.self_attn.q_proj.weight" in out and "d h/model r k" in out


def test_inspect_lists_adapters_and_frozen_weights(here):
    adapters = "--lora-rank", "2", "--lora-targets", "q_proj"
    code, out, _ = here("inspect", "--model", str(LLAMA), "--mesh", "pipe=2,model=2", *adapters)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and f"{2 * 2 * (12 + 24)} parameters of adapters, and " in out
    assert ["block1/attention/query_lora_b", "q", "h/model", "r", "k", "2x2x3x4", "2x1x3x4", "0"] in lines
    assert ["block1/mlp/down", "f/model", "d", "14x12", "7x12", "1"] in lines
    assert "(f) frozen weights" in out
    assert ["zero", "0", "384", "384", "768", "0", "5,056", "6,592"] in lines


def test_verify_takes_adapters(here):
    options = "--lora-rank", "2", "--steps", "1", "--batch-size", "4", "--length", "8"
    code, out, error = here("verify", "--model", str(LLAMA), *options)
    assert code == 0 and "agrees to" in out, error
    code, _, error = here("verify", "--strategy", "data-parallel", "--lora-rank", "2")
    assert code == 2 and "omit --lora-rank" in error


def test_adapters_out_and_in(here, tmp_path):
    """A checkpoint with adapters, exported for PEFT, answers as what was exported merged."""
    known = np.load(ADAPTER / "reference.npz")
    np.save(tmp_path / "x.npy", known["tokens"])
    code, _, error = here(
        "infer", "--model", str(LLAMA), "--adapter", str(ADAPTER), "--input", "x.npy", "--output", "y.npy"
    )
    assert code == 0, error
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), known["logits"], rtol=0, atol=1e-5)
    code, _, error = here("infer", "--adapter", "a", "--run", "b", "--input", "x.npy", "--output", "y.npy")
    assert code == 2 and "--adapter goes with --model" in error


def test_trained_with_adapters_and_exported(here, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(np.random.default_rng(0).integers(97, 107, 2000).astype(np.uint8)))
    options = ["--data", str(text), "--steps", "1", "--batch-size", "2", "--length", "16", *QUIET]
    code, _, error = here("train", "--model", "llama-nano", "--lora-rank", "2", *options)
    assert code == 2 and "adapters need trained weights, and llama-nano has none" in error
    assert here("train", "--model", "llama-nano", *options, "--run", "runs/base")[0] == 0
    assert here("checkpoint", "export", "runs/base", "base", "--format", "huggingface")[0] == 0
    code, _, error = here("train", "--model", "./base", "--lora-rank", "2", *options, "--run", "runs/a")
    assert code == 0, error
    assert here("checkpoint", "export", "runs/a", "adapter", "--format", "peft")[0] == 0
    assert here("checkpoint", "export", "runs/a", "whole", "--format", "huggingface")[0] == 0
    assert here("checkpoint", "export", "runs/a", "whole.gguf", "--format", "gguf")[0] == 0
    assert here("checkpoint", "convert", "whole.gguf", "again")[1].endswith("again\n")
    np.save(tmp_path / "x.npy", np.arange(20)[None])
    answers = []
    of_base = ["--model", "base", "--adapter", "adapter"]
    for model in (["--run", "runs/a"], *(["--model", name] for name in ("whole", "whole.gguf", "again")), of_base):
        code, _, error = here("infer", *model, "--input", "x.npy", "--output", "y.npy")
        assert code == 0, error
        answers.append(np.load(tmp_path / "y.npy"))
    assert abs(answers[0]).max() > 0.01
    for answer in answers[1:]:
        np.testing.assert_allclose(answer, answers[0], rtol=0, atol=1e-5)


def test_a_model_is_converted_without_a_run(here, tmp_path):
    code, out, error = here("checkpoint", "convert", str(LLAMA), "llama.gguf", "--dtype", "bfloat16")
    assert (code, out) == (0, "llama.gguf\n"), error
    code, _, error = here("checkpoint", "convert", "llama.gguf", "llama.npz")
    assert code == 2 and "a folder is written here, no .npz file" in error
    code, _, error = here("checkpoint", "convert", str(LLAMA), "llama.gguf")
    assert code == 2 and "llama.gguf is there already" in error
    code, _, error = here("checkpoint", "convert", "nowhere", "x.gguf")
    assert code == 2 and "nowhere is no model" in error


def test_blocks_of_a_gguf_file_are_unpacked_into_a_folder(here, tmp_path):
    file = FOLDERS.parent / "gguf" / "llama.gguf"
    code, _, error = here("checkpoint", "convert", str(file), "unpacked", "--dtype", "float32")
    assert code == 0, error
    packed, unpacked = Pretrained(file), Pretrained(tmp_path / "unpacked")
    assert any(isinstance(each.tensor, BlockedTensor) for each in packed.filled.values())
    assert packed.filled.keys() == unpacked.filled.keys()
    for name in packed.filled:
        np.testing.assert_array_equal(packed[name][...], unpacked[name][...])


@pytest.fixture
def gpt2(tmp_path):
    """A folder of weights, called as a built-in model."""
    return shutil.copytree(FOLDERS / "gpt2", tmp_path / "gpt2")


#: Choices that leave a search few plans.
FEW = ["--micro-batches", "1", "--zero", "0", "--recompute", "none"]
LOOKING = (["inspect"], ["analyze", "--mesh", "data=2"], ["plan", "--ranks", "2", "--axes", "data", *FEW])


def test_a_built_in_name_is_the_built_in_model_and_the_folder_is_mentioned(here, gpt2):
    code, out, error = here("inspect", "--model", "gpt2")
    assert code == 0 and "124,439,808 parameters" in out
    assert (
        error
        == "spmd_engine: note: --model gpt2 is the built-in model; for the weights in ./gpt2 write --model ./gpt2\n"
    )
    code, out, error = here("inspect", "--model", "./gpt2")
    assert (code, error) == (0, "") and "3,820 parameters" in out
    gpt2.rename(gpt2.with_name("gpt-mini")).joinpath("config.json").unlink()  # a folder of something else
    assert here("inspect", "--model", "gpt-mini")[2] == ""


def test_all_commands_have_the_same_rule(here, gpt2):
    """It is seen before they find that something else is missing."""
    commands = [
        "train",
        "verify",
        "inspect",
        "analyze",
        "plan",
        *(f"show {x}" for x in ("sharding", "experts")),
    ]
    for command in (*commands, "show communication"):
        assert "note: --model gpt2 is the" in here(*command.split(), "--model", "gpt2", "--mesh", "oops")[2], command


@pytest.mark.parametrize(
    "command",
    [["generate", "--prompt", "a"], ["eval", "--text", "ab"], ["infer", "--input", "x.npy", "--output", "y.npy"]],
    ids=lambda command: command[0],
)
def test_commands_that_need_weights_suggest_a_path_for_a_built_in_name(command, here, gpt2, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(8)[None])
    code, _, error = here(*command, "--model", "gpt2")
    assert code == 2 and "gpt2 is a built-in model, which has no weights; for those in ./gpt2 write ./gpt2" in error


def test_names_of_the_hub_are_found_in_its_cache_alone(here, gpt2, tmp_path, monkeypatch):
    kept = tmp_path / "home" / "hub" / "models--acme--tiny"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc123")
    (kept / "snapshots").mkdir()
    blobs = gpt2.rename(kept / "blobs")
    (kept / "snapshots" / "abc123").mkdir()
    for file in blobs.iterdir():
        (kept / "snapshots" / "abc123" / file.name).symlink_to(file)
    np.save(tmp_path / "x.npy", np.arange(8)[None])
    ask = ["infer", "--input", "x.npy", "--output", "y.npy", "--model", "acme/tiny"]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
    code, _, error = here(*ask)
    assert code == 2 and "acme/tiny is no model: there is no such folder, and no snapshot of it in the hub's" in error
    assert "'hf download acme/tiny --local-dir tiny'" in error and error.count("\n") == 1
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert here(*ask) == (0, "", "wrote y.npy: float32[1, 8, 23]\n")
    assert "tiny, 3,820 parameters" in here("plan", "--ranks", "2", "--axes", "data", *FEW, "--model", "acme/tiny")[1]
    assert "acme/tiny: 3,820 parameters" in here("inspect", "--model", "acme/tiny")[1]
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    assert here(*ask) == (0, "", "wrote y.npy: float32[1, 8, 23]\n")
    shutil.copytree(FOLDERS / "llama", tmp_path / "acme" / "tiny")  # what is here comes first
    assert "acme/tiny: 3,820 parameters" not in here("inspect", "--model", "acme/tiny")[1]


def test_weights_are_served_in_float64_as_well(here, gpt2, tmp_path):
    reference = np.load(gpt2 / "reference.npz")
    np.save(tmp_path / "x.npy", reference["tokens"])
    ask = ["infer", "--model", "./gpt2", "--input", "x.npy", "--output", "y.npy"]
    assert here(*ask, "--dtype", "float64") == (0, "", "wrote y.npy: float64[2, 72, 23]\n")
    assert np.load(tmp_path / "y.npy").dtype == np.float64
    assert np.abs(np.load(tmp_path / "y.npy") - reference["logits64"]).max() < 1e-10


def test_a_run_does_not_replace_the_configuration_of_a_model(here, gpt2):
    before = (gpt2 / "config.json").read_bytes()
    options = ["--model", "mlp", *TEXT, "--steps", "1", "--batch-size", "2", *QUIET]
    code, _, error = here("train", *options, "--run", "./gpt2")
    assert code == 2 and "gpt2 holds a model, whose config.json a run would replace; give another --run" in error
    assert here("train", *options, "--run", "gpt2")[0] == 0
    assert (gpt2.parent / "runs" / "gpt2" / "config.json").is_file()
    assert (gpt2 / "config.json").read_bytes() == before


def test_inspect_names_fields_that_are_not_heeded_and_fails_before_it_prints(here, gpt2, caplog):
    config = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps(config | {"some_odd_field": 3}))
    for command in LOOKING:
        caplog.clear()
        assert here(*command, "--model", "./gpt2")[0] == 0
        assert [each for each in caplog.messages if each.endswith("unknown fields, ignored: some_odd_field")]
    (gpt2 / "model.safetensors").unlink()
    code, out, error = here("inspect", "--model", "./gpt2")
    assert (code, out) == (2, "") and "neither model.safetensors nor" in error


@pytest.mark.usefixtures("narrow")
def test_verify_takes_what_routers_take(here):
    sizes = ["--model", "gpt-moe-nano", "--steps", "1", "--batch-size", "2", "--length", "8"]
    code, out, error = here("verify", *sizes, "--capacity-factor", "0.5", "--z-loss", "0.01")
    assert code == 0 and "agree" in out, error
