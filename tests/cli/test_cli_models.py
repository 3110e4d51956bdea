"""Models by path at the command line: trained with adapters, exported, answering, and compared with a reference."""

from pathlib import Path

import numpy as np

from command_line import QUIET

GOLDEN = Path(__file__).parents[1] / "golden"
ADAPTER = GOLDEN / "adapter" / "llama"
LLAMA = GOLDEN / "decoders" / "llama"


def test_a_reference_is_met_or_the_first_layer_named(here, tmp_path):
    known = np.load(LLAMA / "reference.npz")
    np.savez(tmp_path / "right.npz", tokens=known["tokens"], logits=known["logits64"])
    np.savez(tmp_path / "wrong.npz", tokens=known["tokens"], logits=known["logits64"] + 1)
    code, out, _ = here("verify", "--import", str(LLAMA), "--reference", str(tmp_path / "right.npz"))
    assert code == 0 and "all 1 agree to 0.0001" in out
    code, out, _ = here("verify", "--import", str(LLAMA), "--reference", str(tmp_path / "wrong.npz"))
    assert code == 1 and "head is the first that differs" in out and "It has lm_head.weight" in out
    code, _, error = here("verify", "--import", str(LLAMA))
    assert code == 2 and "they go together" in error


def test_inspect_says_what_goes_where(here):
    code, out, _ = here("inspect", "--model", str(LLAMA), "--mesh", "model=2")
    assert code == 0 and "model.layers.*.self_attn.q_proj.weight" in out and "d h/model r k" in out


def test_inspect_lists_adapters_and_frozen_weights(here):
    adapters = "--lora-rank", "2", "--lora-targets", "q_proj"
    code, out, _ = here("inspect", "--model", str(LLAMA), "--mesh", "pipe=2,model=2", *adapters)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and f"{2 * 2 * (12 + 24)} parameters of adapters beside " in out
    assert ["block1/attention/query_lora_b", "q", "h/model", "r", "k", "2x2x3x4", "2x1x3x4", "0"] in lines
    assert ["block1/mlp/down", "f/model", "d", "14x12", "7x12", "1"] in lines
    assert next(line for line in lines if line[:2] == ["frozen", "weights"])[2] != "0"


def test_verify_takes_adapters(here):
    options = "--lora-rank", "2", "--steps", "1", "--batch-size", "4", "--length", "8"
    code, out, error = here("verify", "--model", str(LLAMA), *options)
    assert code == 0 and "agrees to" in out, error
    code, _, error = here("verify", "--strategy", "data-parallel", "--lora-rank", "2")
    assert code == 2 and "without --lora-rank" in error


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
    options = ["--data", str(text), "--steps", "1", "--batch-size", "2", *QUIET]
    code, _, error = here("train", "--model", "llama-nano", "--lora-rank", "2", *options)
    assert code == 2 and "adapters are of trained weights, but llama-nano begins with none" in error
    assert here("train", "--model", "llama-nano", *options, "--run", "runs/base")[0] == 0
    assert here("checkpoint", "export", "runs/base", "base", "--format", "huggingface")[0] == 0
    code, _, error = here("train", "--model", "./base", "--lora-rank", "2", *options, "--run", "runs/a")
    assert code == 0, error
    assert here("checkpoint", "export", "runs/a", "adapter", "--format", "peft")[0] == 0
    assert here("checkpoint", "export", "runs/a", "whole", "--format", "huggingface")[0] == 0
    np.save(tmp_path / "x.npy", np.arange(20)[None])
    answers = []
    for model in (["--run", "runs/a"], ["--model", "whole"], ["--model", "base", "--adapter", "adapter"]):
        code, _, error = here("infer", *model, "--input", "x.npy", "--output", "y.npy")
        assert code == 0, error
        answers.append(np.load(tmp_path / "y.npy"))
    assert abs(answers[0]).max() > 0.01
    for answer in answers[1:]:
        np.testing.assert_allclose(answer, answers[0], rtol=0, atol=1e-5)
