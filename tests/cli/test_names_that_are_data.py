"""Names that decide numbers: random streams and parameters are keyed by texts, so a renaming must not change a run.

``python tests/cli/test_names_that_are_data.py`` writes the expected values anew, for a release that breaks them.
"""

import hashlib
import io
import json
import shutil
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from spmd_engine import run_threads
from spmd_engine.checkpoints import Checkpoint
from spmd_engine.cli import main
from spmd_engine.models.names import MODELS, build_model
from support.command_line import metrics
from support.pairwise import in_turn

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED = GOLDEN / "names_that_are_data.json"
COMMON = ["--dtype", "float64", "--eval-every", "0", "--eval-samples", "2", "--sample", "0", "--seed", "3"]
LANGUAGE = [*COMMON, "--batch-size", "2", "--dropout", "0.1", "--steps", "2", "--warmup", "50"]
IMAGES = [*COMMON, "--batch-size", "4", "--steps", "10", "--warmup", "2"]
RUNS = {
    "gpt-nano": ["--model", "gpt-nano", *LANGUAGE],
    "random routing": [*("--model", "gpt-moe-nano", "--routing", "random", "--bias-rate", "0.01"), *LANGUAGE],
    "adapters": ["--model", str(GOLDEN / "decoders" / "mixtral"), *LANGUAGE, "--length", "24", "--lora-rank", "2"],
    "mlp": ["--model", "mlp", *IMAGES],
    "resnet-nano": ["--model", "resnet-nano", *IMAGES, "--steps", "3", "--augment", "shift-flip"],
    "PowerSGD": ["--model", "mlp", *IMAGES, "--compress", "powersgd:2"],  # on two ranks
    "a strategy": ["--strategy", "tensor-parallel", *COMMON, "--steps", "3", "--warmup", "50"],
}
LETTERS = GOLDEN / "runs" / "letters.tokens"


def corpus(folder):
    """Letters that no library decides."""
    path = folder / "corpus.txt"
    path.write_text("".join(chr(97 + (i * i // 7 + i // 5) % 26) for i in range(20_000)))
    return path


def train(name, folder):
    """The losses, norms of gradients, and names and sums of squares of all that a short run has saved."""
    run, data = folder / "run", {"resnet-nano": None, "adapters": LETTERS}.get(name, corpus(folder))
    arguments = ["train", *RUNS[name], *(["--data", str(data)] if data else []), "--run", str(run)]
    run_threads(lambda: main(arguments), 2 if name == "PowerSGD" else 1)
    steps = [[step["loss"], step["grad_norm"]] for step in metrics(run)]
    checkpoint = Checkpoint(run)
    saved = {**dict(checkpoint.items()), **dict(checkpoint.section("optimizer").items())}
    names = json.dumps(sorted([name, list(array.shape)] for name, array in saved.items()))
    squares = sum(float(np.sum(np.square(array[...], dtype=np.float64))) for array in saved.values())
    return {"steps": steps, "names": hashlib.sha256(names.encode()).hexdigest(), "squares": squares}


def described(name):
    """Names, shapes and initial distributions of a model's parameters and buffers, as one digest."""
    model = build_model(name)
    parameters = [[name, list(shape), each.mean, each.std] for name, (each, shape) in model.parameters()]
    buffers = [[name, list(shape), each.initial, each.std] for name, (each, shape) in model.buffers()]
    return hashlib.sha256(json.dumps([parameters, buffers]).encode()).hexdigest()


def generate(folder):
    """Tokens drawn from an untrained model."""
    run, prompt = folder / "run", ["--prompt", "ab", "--temperature", "1.0", "--seed", "5", "--tokens", "24"]
    main(
        [
            "train",
            "--model",
            "gpt-nano",
            *LANGUAGE,
            "--steps",
            "0",
            "--data",
            str(corpus(folder)),
            "--run",
            str(run),
        ]
    )
    text = io.StringIO()
    with redirect_stdout(text):
        main(["generate", "--run", str(run), *prompt])
    return text.getvalue()


@pytest.fixture(scope="module")
def expected():
    return json.loads(EXPECTED.read_text())


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_every_model_keep_names_and_initial_distributions(name, expected):
    assert described(name) == expected["models"][name]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_computes_what_it_always_did(name, expected, tmp_path):
    found, kept = train(name, tmp_path), expected["runs"][name]
    np.testing.assert_allclose(found["steps"], kept["steps"], rtol=1e-8)
    np.testing.assert_allclose(found["squares"], kept["squares"], rtol=1e-8)
    assert found["names"] == kept["names"]


def test_generated_text_is_what_it_always_was(expected, tmp_path):
    assert generate(tmp_path) == expected["text"]


# --- runs that an earlier release saved

#: Losses of the steps after the one that was saved, and the digests of the checkpoint and of the run's end.
EARLIER = {
    "text": (
        ["--data", str(LETTERS), "--sample", "8", "--zero", "1"],
        "pipe=2,expert=2",
        [3.2424277240817165, 3.1046895177488008, 3.0298984211064033, 2.93448320746252],
        "8a90b968831c1e8d00d2ec531e53af06230ae1cf8a4ef717f9f4c97249e04963",
        1e-10,
    ),
    "images": (
        ["--zero", "2"],
        "data=2",
        [2.6771649941802025, 2.738578997552395],
        "0adb0dce9009f7e36af8e9317e528ebb72f03ca277c1ce0b343ed40bbf8bf894",
        1e-3,  # float32
    ),
}


@in_turn(2, name=list(EARLIER), elsewhere={"same mesh": False, "one rank": True})
def test_a_run_of_version_0_1_goes_on(name, elsewhere, virtual, tmp_path):
    options, mesh, losses, digest, tolerance = EARLIER[name]
    run = shutil.copytree(GOLDEN / "runs" / name, tmp_path / name, symlinks=True)
    assert digest in virtual(1, "checkpoint", "digest", run).out
    assert "sound" in virtual(1, "checkpoint", "verify", run).out
    before = len(metrics(run))
    if elsewhere:
        virtual(1, "train", "--resume", "--run", run, *options)
    else:
        ranks = int(np.prod([int(axis.split("=")[1]) for axis in mesh.split(",")]))
        virtual(ranks, "train", "--resume", "--run", run, "--mesh", mesh, *options)
    found = [step["loss"] for step in metrics(run)[before:]]
    np.testing.assert_allclose(found, losses, rtol=tolerance)


if __name__ == "__main__":
    values = {"models": {name: described(name) for name in MODELS}, "runs": {}}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            values["runs"][name] = train(name, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        values["text"] = generate(Path(folder))
    EXPECTED.write_text(json.dumps(values, indent=1) + "\n")
