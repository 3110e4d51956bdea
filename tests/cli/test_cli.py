"""Training, serving and inspecting by the command line, as people start it."""

import json
import sys
from math import prod

import numpy as np
import pytest
from safetensors.numpy import save_file

from spmd_engine.cli import main
from spmd_engine.models.names import build_model
from spmd_engine.training import TrainConfig
from support import saved
from support.command_line import QUIET, TEXT, metrics

STEPS = 2
EXACT = ["--model", "gpt-nano", "--dtype", "float64", "--steps", str(STEPS), "--warmup", "1", "--dropout", "0.1"]
EXACT += ["--grad-clip", "1", "--length", "8", *QUIET, *TEXT]


pytestmark = pytest.mark.usefixtures("narrow")


#: Options that say where and when, on two ranks; the others, more ranks, and each axis beside another, in SOAK.
COMPOSITIONS = [
    "model=2 --sequence-parallel --zero 1",
    "pipe=2 --schedule zero-bubble --micro-batches 2 --recompute block",
]
SOAK = [
    "context=2 --context-method ulysses --zero 3",
    "data=2 --zero 1",
    "model=2,data=2 --sequence-parallel",
    "context=2,data=2 --context-method ulysses --zero 3",
    "pipe=2,data=2 --schedule 1f1b --zero 1 --micro-batches 2",
    "pipe=4 --schedule zero-bubble --micro-batches 4 --recompute block",
    "pipe=3 --schedule zero-bubble --micro-batches 4 --recompute block",
    "data=3 --zero 3",
    "pipe=2,context=2,model=2 --zero 3 --recompute block",
    "data=8",
    "data=8 --zero 3",
    "model=3",
    "data=2,model=4",
    "model=4,data=2 --sequence-parallel",
    "replicate=2,shard=4",
    "context=4,data=2",
    "context=4,data=2 --context-method ulysses",
    "pipe=2,data=2,model=2 --schedule 1f1b --zero 1 --micro-batches 2",
    "pipe=4,data=2 --schedule interleaved",
    "pipe=8 --schedule zero-bubble --micro-batches 4",
]


def axes_of(composition):
    return {axis: int(size) for axis, size in (part.split("=") for part in composition.split()[0].split(","))}


def exact(composition):
    """The command that trains so, and the one on one rank, each into a folder of its own."""
    mesh, *options = composition.split()
    axes = axes_of(composition)
    replicas = prod(axes.get(axis, 1) for axis in ("data", "replicate", "shard"))
    size = max(4, replicas)  # a sample for each micro-batch, or for each replica
    common = ["train", *EXACT, "--batch-size", str(size)]
    alone = [*common, "--run", f"data=1-{size}"]
    return [*common, "--mesh", mesh, *options, "--run", composition.replace(" ", "")], alone


def assert_alike(folder, reference):
    ours, theirs = ([m["loss"] for m in metrics(each)] for each in (folder, reference))
    assert len(ours) == STEPS
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    expected, parameters = saved.parameters(reference), saved.parameters(folder)
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        np.testing.assert_allclose(parameter, expected[name], rtol=0, atol=1e-8, err_msg=f"{folder}: {name}")


def test_gpt_nano_trains_alike_however_it_is_composed(several, here, tmp_path):
    """Steps in float64, dropout and clipping on: losses to 1e-9, parameters to 1e-8 of one rank's."""
    commands, (alone, *others) = zip(*map(exact, COMPOSITIONS), strict=True)
    assert all(other == alone for other in others) and {prod(axes_of(each).values()) for each in COMPOSITIONS} == {2}
    here(*alone)
    several(2, *commands)
    for command in commands:
        assert_alike(tmp_path / "runs" / command[-1], tmp_path / "runs" / alone[-1])


@pytest.mark.soak
@pytest.mark.parametrize("composition", SOAK)
def test_gpt_nano_trains_alike_on_more_ranks(several_by_mpi, here, tmp_path, composition):
    command, alone = exact(composition)
    here(*alone)
    several_by_mpi(prod(axes_of(composition).values()), command)
    assert_alike(tmp_path / "runs" / command[-1], tmp_path / "runs" / alone[-1])


def test_train_resume_generate_infer(several, virtual, here, tmp_path):
    """Begun on two ranks, gone on with on four, with uneven shares."""
    short = ["--batch-size", "2", "--length", "12", "--seed", "3", "--warmup", "2", *QUIET, *TEXT]
    here("train", "--steps", "4", "--run", "whole", "--stop-at", "1", *short)
    errors = virtual(2, "train", "--steps", "2", "--run", "parts", *short).err
    assert "validation loss" in errors
    runs = tmp_path / "runs"
    with (runs / "parts" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "loss": 0.0}) + "\n")  # of a run that broke off after its checkpoint
    tokens = np.random.default_rng(0).integers(0, 257, (3, 40))
    np.save(tmp_path / "x.npy", tokens)
    generate = ["generate", "--run", "runs/parts", "--prompt", "def f(", "--tokens", "8"]
    infer = ["infer", "--run", "runs/parts", "--input", "x.npy", "--batch-size", "2"]
    _, text, _ = several(
        4,
        ["train", "--resume", "--run", "parts", "--steps", "4", "--mesh", "data=2,model=2", "--shares", "model=3:1"],
        generate,
        [*infer, "--output", "b", "--mesh", "model=4", "--shares", "model=3:1:0:2"],
    )
    assert [m["step"] for m in metrics(runs / "parts")] == [1, 2, 3, 4]
    ours, theirs = metrics(runs / "parts"), metrics(runs / "whole")
    for line, other in zip(ours[:1], theirs[:1], strict=True):  # later rates follow from --steps
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert set(ours[0]) == {
        *("step", "loss", "grad_norm", "learning_rate", "tokens", "seconds", "tokens_per_second", "bytes_sent"),
        *("exposed_communication", "gigabytes_per_second", "shares", "cpu_seconds", "private_bytes", "predicted"),
        "products",
    }

    assert text == here(*generate)[1] and text.startswith("def f(")
    assert here(*infer, "--output", "a", "--mesh", "data=1")[0] == 0
    a, b = np.load(tmp_path / "a"), np.load(tmp_path / "b")
    assert a.shape == (3, 40, 257)
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_resume_takes_over_the_run_s_own_options(here, r):
    code, _, errors = here("train", "--steps", "2", "--resume", "--run", "r")
    assert code == 0 and "note: the learning rate of step 2 is 0.0004, as before, on its curve of 1 steps" in errors
    assert metrics(r)[1]["tokens"] == 2 * 128
    assert json.loads((r / "config.json").read_text())["training"]["decay_steps"] == 1
    code, _, errors = here("train", "--resume", "--run", "r")  # all steps were made: says so, changes nothing
    assert len(metrics(r)) == 2 and code == 0 and "nothing to do" in errors and "learning rate" not in errors


def test_resume_keeps_the_composition_that_fits_the_new_mesh(virtual, here, tmp_path):
    def composition():
        return json.loads((tmp_path / "runs" / "r" / "config.json").read_text())["composition"]

    compose = ["--zero", "3", "--schedule", "interleaved", "--chunks", "3", "--group-cap", "100000"]
    short = ["--steps", "1", "--decay-steps", "2", "--batch-size", "2", "--length", "8", *QUIET, *TEXT]
    virtual(2, "train", "--mesh", "pipe=2", *compose, "--run", "r", *short)
    resume = ["--resume", "--run", "r", "--steps", "2", "--stages", "cost"]
    errors = virtual(4, "train", "--mesh", "data=2,pipe=2", *resume).err
    kept = {"zero": 3, "schedule": "interleaved", "chunks": 3, "stages": "cost", "group_cap": 100000}
    assert kept.items() <= composition().items() and "note" not in errors
    _, _, errors = here("train", "--resume", "--run", "r", "--steps", "3")
    assert "--zero 3 has no effect" not in errors and "--schedule interleaved has no effect" in errors
    assert composition()["zero"] == 3


@pytest.mark.parametrize("option, value", [("seed", "3"), ("batch-size", "4"), ("model", "mlp")])
def test_resume_refuses_what_decides_what_is_computed(here, tmp_path, option, value):
    TrainConfig.of(model="gpt-nano", batch_size=2, steps=1).write(tmp_path / "config.json")
    code, _, errors = here("train", "--resume", "--run", str(tmp_path), f"--{option}", value)
    assert code == 2 and errors.count("\n") == 1
    assert f"{option.replace('-', '_')} {value} cannot go on with it" in errors


def test_a_run_described_by_a_file_is_the_run(here, tmp_path):
    few = ["--model", "mlp", "--steps", "2", "--batch-size", "4", "--learning-rate", "0.1", *QUIET, *TEXT]
    here("train", *few, "--run", "first")
    here("train", "--config", "runs/first/config.json", "--run", "second")
    first, second = tmp_path / "runs" / "first", tmp_path / "runs" / "second"
    assert (first / "config.json").read_text() == (second / "config.json").read_text()
    assert saved.everything(first) == saved.everything(second)


def test_infer_with_an_engine_of_one_s_own(several, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from spmd_engine import world, Mesh\n"
        "from spmd_engine.strategies import TensorParallel\n"
        "def make():\n"
        "    return TensorParallel(4, 6, Mesh(model=world().size))\n"
    )
    from safetensors.numpy import save_file

    from spmd_engine.strategies.two_layers import initial_parameters

    whole = initial_parameters(4, 6)
    save_file(whole, tmp_path / "w.safetensors")
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    args = ["--engine", "mine:make", "--checkpoint", "w.safetensors", "--input", "x.npy", "--output", "y.npy"]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    several(3, ["infer", *args])
    w0, w1 = whole.values()
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), np.maximum(x @ w0, 0) @ w1, atol=1e-5)


ENGINES_TO_SERVE = """
import numpy as np
from spmd_engine import Mesh
from spmd_engine.engine import ShardedEngine
from spmd_engine.strategies import TensorParallel

class Matrix(ShardedEngine):
    input_sharding = output_sharding = "b/data d"
    parameters = {"w": np.ones((4, 3))}
    def load_checkpoint(self, params):
        self.parameters = {"w": self.block("w", params["w"])}
    def forward(self, x):
        return x @ self.parameters["w"]
    backward = None

def on(mesh):
    print("mesh", mesh)
    return TensorParallel(4, 6, mesh)

def alone():
    return TensorParallel(4, 6, Mesh(model=1))
"""


@pytest.fixture
def infer_here(tmp_path, monkeypatch, capsys):
    """'infer' on one rank, this process, of inputs of a shape: its code, output and errors."""
    (tmp_path / "served.py").write_text(ENGINES_TO_SERVE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "served", raising=False)

    def run(shape, *args, dtype=np.float64):
        np.save(tmp_path / "x.npy", np.zeros(shape, dtype))
        code = 0
        try:
            main(["infer", "--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npy"), *map(str, args)])
        except SystemExit as leave:
            code = leave.code
        return code, *capsys.readouterr()

    return run


def test_infer_hands_an_engine_its_mesh(infer_here):
    assert infer_here((3, 4), "--engine", "served:on", "--mesh", "data=1,model=1")[:2] == (0, "mesh data=1,model=1\n")


def test_infer_refuses_a_mesh_that_the_engine_does_not_take(infer_here):
    assert infer_here((3, 4), "--engine", "served:alone")[0] == 0
    code, _, err = infer_here((3, 4), "--engine", "served:alone", "--mesh", "data=1")
    assert code == 2 and "served:alone makes a mesh of its own, model=1, instead of --mesh data=1" in err


@pytest.mark.parametrize("path", [".", "parameters.safetensors"])
def test_infer_takes_a_folder_that_was_saved_or_a_file(infer_here, tmp_path, path):
    save_file({"w": np.full((4, 3), 2.0)}, tmp_path / "parameters.safetensors")
    code, _, err = infer_here((3, 4), "--engine", "served:Matrix", "--checkpoint", tmp_path / path)
    assert (code, err) == (0, f"wrote {tmp_path / 'y.npy'}: float32[3, 3]\n")
    assert np.load(tmp_path / "y.npy").shape == (3, 3)


def test_infer_error_names_the_shape_of_an_engine(infer_here):
    code, _, err = infer_here((3,), "--engine", "served:Matrix")
    assert code == 2 and "x.npy has shape (3,), but inputs are [b d], the batch first: save an array of " in err
    code, _, err = infer_here((3, 5), "--engine", "served:alone")
    assert code == 2 and "x.npy has shape (3, 5), and the engine takes [b d]: if sizes do not fit, save" in err
    with pytest.raises(ValueError, match="matmul") as failure:  # with its traceback
        infer_here((3, 5), "--engine", "served:Matrix")
    assert "has shape (3, 5), and the engine takes [b d]" in failure.value.__notes__[0]


def test_infer_error_names_the_shape_of_a_run(infer_here, tmp_path):
    run = ["--run", tmp_path / "runs" / "scores"]
    main(["train", "--model", "mlp", *map(str, run), "--steps", "1", "--batch-size", "2", *QUIET, *TEXT])
    for shape in ((3, 65), (3, 28, 28)):
        code, _, err = infer_here(shape, *run)
        assert code == 2 and f"has shape {shape}, but inputs are [b d], the batch first: save an" in err
        assert "shape (b, 784)" in err
    assert infer_here((3, 784), *run, dtype=np.float32)[0] == 0


def test_inspect_needs_no_ranks(here):
    _, text, _ = here("inspect", "--mesh", "data=2,model=4")
    count = build_model("gpt-nano").parameter_count
    assert f"{count:,} parameters" in text and "8 ranks" in text
    assert "block0/mlp/w0" in text and "d f/model" in text and "v/model d" in text
    assert f"{count * 4:,}" in here("inspect")[1]


def test_prepare_train_score_and_write(several, here, tmp_path):
    """From files of text to text, by way of a file of tokens."""
    lines = "".join(json.dumps({"prompt": f"{n} + 1 =", "completion": f" {n + 1}"}) + "\n" for n in range(60))
    (tmp_path / "sums.jsonl").write_text(lines)
    short = ["--length", "16", "--batch-size", "4", "--warmup", "1", *QUIET]
    scores = ["eval", "--run", "runs/sums", "--file", "sums.tokens", "--json"]
    writes = ["generate", "--run", "runs/sums", "--prompt", "1 + 1 =", "--prompt", "22 + 1"]
    writes += ["--tokens", "6", "--top-k", "9", "--json"]
    told, _, *together = several(
        2,
        ["data", "prepare", "sums.jsonl", "--output", "sums.tokens"],
        [
            "train",
            "--data",
            "sums.tokens",
            "--steps",
            "2",
            "--run",
            "sums",
            "--mesh",
            "model=2",
            *short,
        ],  # as predicted
        scores,
        [*writes, "--mesh", "model=2"],
    )
    assert "60 documents" in told and told.count("vocabulary 257") == 1
    assert here("data", "inspect", "sums.tokens", "--verify")[0] == 0
    alone = [here(*scores)[1], here(*writes, "--mesh", "model=1")[1]]
    scored = [json.loads(text)["log_probs"] for text in (alone[0], together[0])]
    np.testing.assert_allclose(*scored, atol=1e-4)
    first, second = ([json.loads(line) for line in text.splitlines()] for text in (alone[1], together[1]))
    assert [each["tokens"] for each in first] == [each["tokens"] for each in second]
    assert [len(each["tokens"]) for each in first] == [6, 6]


def test_help_tells_every_command(here):
    _, text, _ = here("--help")
    for command in ("train", "generate", "infer", "inspect"):
        assert command in text
        code, output, _ = here(command, "--help")
        assert code == 0 and "--mesh" in output


def test_a_run_broken_off_and_resumed_is_the_run_that_was_not(several, here, tmp_path):
    common = ["--model", "two-layers", "--steps", "4", "--batch-size", "2", "--dtype", "float64", "--warmup", "2"]
    common += [*QUIET, *TEXT]
    here("train", *common, "--run", "whole")
    begins = ["train", *common, "--stop-at", "2", "--run", "parts"]
    several(2, begins, ["train", "--resume", "--run", "parts", "--mesh", "model=2"])
    ours, theirs = ([m["loss"] for m in metrics(tmp_path / "runs" / name)] for name in ("parts", "whole"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-11)
