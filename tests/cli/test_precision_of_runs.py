"""--precision on the command line: runs that change it, what they save, and what refuses it."""

import json

import numpy as np
import pytest

from spmd_engine.checkpoints.read import read_manifest
from spmd_engine.training import loss_scale
from support import saved
from support.command_line import QUIET, TEXT, metrics

pytestmark = pytest.mark.usefixtures("narrow")
SMALL = ["train", "--model", "gpt-nano", "--length", "16", "--batch-size", "4", *QUIET, *TEXT]


def test_a_run_goes_on_in_another_precision_and_back(virtual, here, tmp_path):
    run = tmp_path / "run"
    virtual(
        2,
        *SMALL,
        "--precision",
        "bfloat16",
        "--mesh",
        "data=2",
        "--zero",
        "1",
        "--steps",
        "4",
        "--stop-at",
        "1",
        "--run",
        str(run),
    )
    first = saved.parameters(run)
    assert {array.dtype.name for array in (*first.values(), *saved.state(run).values())} == {"float32"}
    goes_on = ["train", "--resume", "--run", str(run), "--mesh", "data=1", "--zero", "0"]
    for precision, steps in (("float32", "2"), ("float16", "3"), ("bfloat16", "4")):
        code, _, error = here(*goes_on, "--precision", precision, "--stop-at", steps)
        assert code == 0, error
        assert json.loads((run / "config.json").read_text())["model"]["dtype"] == precision
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    assert any((array != first[name]).any() for name, array in saved.parameters(run).items())
    code, text, error = here(
        "generate", "--run", str(run), "--precision", "float32", "--prompt", "def", "--tokens", "3"
    )
    assert code == 0 and text.startswith("def"), error


def test_the_loss_scale_is_saved_and_restored(here, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(loss_scale, "GROW_AFTER", 1)
        here(*SMALL, "--precision", "float16", "--steps", "3", "--stop-at", "2", "--run", str(run))
    assert read_manifest(max((run / "checkpoints").glob("step-*"))).facts["loss_scale"]["value"] == 2**18
    assert here("train", "--resume", "--run", str(run))[0] == 0
    assert [line["loss_scale"] for line in metrics(run)] == [2**16, 2**17, 2**18]


def test_tf32_is_refused_on_a_cpu(here):
    code, _, error = here(*SMALL, "--tf32", "--steps", "1")
    assert code == 2 and "--tf32: a CPU has no products of TF32" in error and error.count("\n") == 1


def test_the_first_line_after_a_start_names_the_libraries_of_products(here, tmp_path):
    run = tmp_path / "run"
    here(*SMALL, "--products", "numpy", "--steps", "3", "--stop-at", "2", "--run", str(run))
    here("train", "--resume", "--run", str(run), "--products", "numpy")
    assert ["products" in line for line in metrics(run)] == [True, False, True]
    by_dtype = metrics(run)[0]["products"]
    assert by_dtype.keys() == {"float32", "bfloat16"} and set(by_dtype["float32"].values()) == {"numpy"}


def test_infer_computes_in_the_precision_of_a_run_or_in_another_and_writes_float32(here, tmp_path):
    run = tmp_path / "run"
    here(*SMALL, "--precision", "bfloat16", "--steps", "1", "--run", str(run))
    np.save(tmp_path / "x.npy", np.arange(8).reshape(1, 8))
    outputs = []
    for precision in [], ["--precision", "bfloat16"], ["--precision", "float32"]:
        files = ["--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npy")]
        assert here("infer", "--run", str(run), *files, *precision)[0] == 0
        outputs.append(np.load(tmp_path / "y.npy"))
    own, same, other = outputs
    assert {output.dtype.name for output in outputs} == {"float32"}
    assert (own == same).all() and (own != other).any() and np.allclose(own, other, atol=0.1)
