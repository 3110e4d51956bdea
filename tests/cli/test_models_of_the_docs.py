"""Layers, models and an engine of the documentation, by ``--model FILE.py:NAME`` in every command that takes them."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from support.command_line import QUIET, metrics
from support.pairwise import in_turn

DOCS = Path(__file__).parents[2] / "docs"
WRAPPED = """
from spmd_engine.layers import Embedding, Head, LayerNorm, Residual
from spmd_engine.models import GPTSize, ImageShape, Mixture, Model, convnet, gpt, token_loss


def of_text(layer, name):
    layers = [("embedding", Embedding(257, 12)), ("own", Residual(LayerNorm(12), layer)), ("head", Head(257, 12))]
    return Model(name, tuple(layers), "b s", "b s v", "b s", token_loss(257), context=8, vocabulary=257)


def gated(hidden=20):
    return of_text(GatedMLP(12, hidden), "gated")


def centred():
    return of_text(Centred(12), "centred")


def causal():
    return of_text(CausalConvolution(12), "causal")


def classifier_of_images():
    return convnet(ImageShape(height=9, width=8, channels=3, classes=5))


def experts(experts=4):
    size = GPTSize(layers=1, width=16, heads=2, context=12, vocabulary=257, mixture=Mixture(experts=experts))
    return gpt(size)
"""
TEXTS = ("gated", "centred", "causal", "experts")
MODELS = (*TEXTS, "model", "classifier_of_images")  # "model" is that of the tutorial: a Model, and no function


def block_with(page, words):
    """The Python block of a page that has these words."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if words in block)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    tutorial = block_with("tutorial.md", "def tagger()")
    parts = [
        block_with("layers.md", "class GatedMLP"),
        block_with("layers.md", "class Centred"),
        block_with("layers.md", "class CausalConvolution"),
        "import spmd_engine as spmd\ndraw = np.random.default_rng(0)",
        tutorial[: tutorial.index("def tag(")],
        WRAPPED,
        block_with("engines.md", "class TensorParallel"),
    ]
    path = tmp_path / "documented.py"
    path.write_text("\n\n".join(parts))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "documented", raising=False)
    monkeypatch.chdir(tmp_path)
    return path


def run(here, *command):
    code, out, error = here(*command)
    assert code == 0, f"{command}: {error}"
    return out


@in_turn(2, name=list(MODELS))
def test_what_is_predicted_and_drawn_of_a_model(name, here):
    model = ["--model", f"documented.py:{name}"]
    sizes = ["--batch-size", "4"]
    parameter = re.search(r"^ (\S+/\S+)", run(here, "inspect", *model, "--mesh", "model=2"), re.MULTILINE)[1]
    assert "zero 3" in run(here, "inspect", *model, "--mesh", "data=2")
    assert "largest peak" in run(here, "analyze", *model, "--mesh", "data=2,model=2", *sizes)
    assert f"{parameter} " in run(here, "show", "sharding", *model, "--param", parameter, "--mesh", "data=2")
    assert "all_reduce" in run(here, "show", "communication", *model, "--mesh", "data=2", *sizes)
    assert "certificate" in run(here, "plan", *model, "--ranks", "2", "--axes", "data", "--seconds", "0.5", *sizes)


@in_turn(2, 1, name=list(MODELS))
def test_a_model_agrees_with_one_device(name, virtual):
    model = ["--model", f"documented.py:{name}", "--batch-size", "4", "--steps", "1"]
    assert "agrees to" in virtual(2, "verify", *model, "--mesh", "model=2").out


@pytest.mark.parametrize("name", TEXTS)
def test_a_model_of_text_is_trained_and_served(name, here, file):
    model = ["--model", f"documented.py:{name}"]
    job = ["train", *model, "--data", str(file), "--steps", "2", "--warmup", "0", "--run", "runs/r", *QUIET]
    run(here, *job)
    assert len(metrics(file.parent / "runs" / "r")) == 2
    assert run(here, "generate", *model, "--run", "runs/r", "--prompt", "def", "--tokens", "3").startswith("def")
    assert "perplexity" in run(here, "eval", *model, "--checkpoint", "runs/r", "--text", "a text")
    np.save("tokens.npy", np.arange(8).reshape(2, 4))
    run(here, "infer", *model, "--run", "runs/r", "--input", "tokens.npy", "--output", "logits.npy")
    assert np.load("logits.npy").shape == (2, 4, 257)
    assert "sound" in run(here, "checkpoint", "verify", "runs/r")
    if name == "experts":
        assert "4 experts" in run(here, "show", "experts", *model, "--run", "runs/r")
        assert "6 experts" in run(here, "show", "experts", *model, "--set", "experts=6", "--mesh", "expert=2")


def test_the_engine_of_the_docs(here, virtual):
    draw = np.random.default_rng(0)
    np.savez("numbers.npz", x=draw.standard_normal((40, 5)), y=draw.standard_normal((40, 5)))
    engine = ["--engine", "documented.py:TensorParallel"]
    assert "agrees to" in virtual(2, "verify", *engine, "--mesh", "model=2", "--input-shape", "4,5").out
    assert "80 parameters" in run(here, "analyze", *engine, "--data", "numbers.npz", "--mesh", "model=2")
    virtual(2, "train", *engine, "--data", "numbers.npz", "--mesh", "model=2", "--steps", "2", "--run", "runs/e")
    np.save("x.npy", np.eye(5))
    virtual(2, "infer", *engine, "--run", "runs/e", "--input", "x.npy", "--output", "y.npy")
    assert np.load("y.npy").shape == (5, 5)
