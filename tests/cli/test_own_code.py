"""Models and engines of the user's own code, named on the command line."""

import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.models.user_code import digest_of, is_code, with_arguments
from support.command_line import QUIET, metrics

ROOT = Path(__file__).parents[2]

CODE = """
import numpy as np
from spmd_engine import Mesh, ShardedEngine
from spmd_engine.arrays import einsum
from spmd_engine.layers import MLP, Embedding, Head, LayerNorm, Residual
from spmd_engine.models import Model, mlp, token_loss


def classifier(hidden=6):
    return mlp((5, hidden, 3), "classifier")


def text(width=8):
    block = Residual(LayerNorm(width), MLP(width, 12))
    layers = (("embedding", Embedding(257, width)), ("block0/mlp", block), ("head", Head(257, width)))
    return Model("text", layers, "b s", "b s v", "b s", token_loss(257), context=16, vocabulary=257)


class Doubling(MLP):
    def forward(self, sh, p, x, ctx):
        y, saved = super().forward(sh, p, x, ctx)
        return y * np.sqrt(2.0), saved


def doubling():
    layers = (("embedding", Embedding(257, 8)), ("own", Doubling(8, 12)), ("head", Head(257, 8)))
    return Model("doubling", layers, "b s", "b s v", "b s", token_loss(257), context=16, vocabulary=257)


ready = text()


class Matrix(ShardedEngine):
    shardings = {"w": "i j/model"}
    input_sharding, output_sharding, target_sharding = "b/data i", "b/data j/model", "b/data j/model"

    def __init__(self, mesh, width=5, dtype=np.float32):
        self.mesh = mesh
        self.load_checkpoint({"w": np.zeros((width, 4), dtype)})

    def load_checkpoint(self, params):
        self.parameters = {"w": self.block("w", params["w"])}

    def forward(self, x):
        self.tape.push(x)
        return einsum("bi,ij->bj", x, self.parameters["w"])

    def backward(self, dy):
        x = self.tape.pop()
        self.input_gradient = self.all_reduce(einsum("bj,ij->bi", dy, self.parameters["w"]), over="model")
        return {"w": self.all_reduce(einsum("bi,bj->ij", x, dy), over="data")}


class WrongSlope(MLP):
    def backward_input(self, sh, p, saved, dy):
        return super().backward_input(sh, p, saved, dy * dy)


def wrong():
    layers = (("embedding", Embedding(257, 8)), ("own", WrongSlope(8, 12)), ("head", Head(257, 8)))
    return Model("wrong", layers, "b s", "b s v", "b s", token_loss(257), context=16, vocabulary=257)


class ByValue(Matrix):
    def forward(self, x):
        if x.sum() > 0:
            x = 2 * x
        return super().forward(x)


def no_model():
    return 3


def needs(width):
    return classifier(width)
"""


@pytest.fixture(autouse=True)
def code(tmp_path, monkeypatch):
    """A file of models, and arrays that they can learn from."""
    path = tmp_path / "own_code.py"
    path.write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((200, 5))
    np.savez("classes.npz", x=x, y=np.argmax(x[:, :3], 1))
    np.savez("numbers.npz", x=x, y=x @ draw.standard_normal((5, 4)), x_validation=x[:8], y_validation=np.zeros((8, 4)))
    return path


CLASSES = ["--model", "own_code.py:classifier", "--data", "classes.npz", "--learning-rate", "0.05", "--warmup", "0"]
NUMBERS = ["--model", "own_code.py:Matrix", "--data", "numbers.npz", "--learning-rate", "0.05", "--warmup", "0"]


@pytest.mark.parametrize("job", [CLASSES, NUMBERS], ids=["model", "engine"])
def test_training_is_the_same_on_other_ranks_and_resumes(job, virtual, here, tmp_path):
    job = ["train", *job, "--dtype", "float64", *QUIET]
    shapes = {"one": "data=1,model=1", "three": "data=3,model=1", "four": "data=2,model=2"}
    for name, mesh in shapes.items():
        ranks = {"one": 1, "three": 3, "four": 4}[name]
        _, error = virtual(ranks, *job, "--steps", "12", "--run", f"runs/{name}", "--mesh", mesh)
        assert "note: the model is code: own_code.py:" in error and "samples/s" in error
    losses = {name: [line["loss"] for line in metrics(tmp_path / "runs" / name)] for name in shapes}
    assert losses["one"][-1] < 0.7 * losses["one"][0]
    np.testing.assert_allclose(losses["three"], losses["one"], rtol=1e-10)
    np.testing.assert_allclose(losses["four"], losses["one"], rtol=1e-10)

    for name, steps in (("whole", "16"), ("parts", "10")):
        assert here(*job, "--steps", "16", "--stop-at", steps, "--run", f"runs/{name}", "--mesh", shapes["one"])[0] == 0
    virtual(2, "train", "--resume", "--run", "runs/parts", "--mesh", "data=2,model=1", *job[1:3])
    whole, parts = ([line["loss"] for line in metrics(tmp_path / "runs" / name)] for name in ("whole", "parts"))
    np.testing.assert_allclose(parts, whole, rtol=1e-10)


def test_every_command_takes_a_model_of_one_s_own(here, virtual, code):
    model = ["--model", "own_code.py:text", "--set", "width=12"]
    assert "own_code.py:text(width=12): 6,504 parameters" in here("inspect", *model, "--mesh", "model=2")[1]
    assert "embedding" in here("analyze", *model, "--mesh", "model=2")[1]
    assert "zero 3" in here("show", "memory", *model, "--mesh", "data=2")[1]
    assert "data=2" in here("plan", *model, "--ranks", "2", "--axes", "data", "--micro-batches", "1")[1]
    assert "agrees to" in virtual(2, "verify", *model, "--mesh", "model=2", "--batch-size", "4").out
    code, out, error = here("train", *model, "--data", str(code), "--steps", "2", "--run", "runs/text", *QUIET)
    assert code == 0, error
    assert json.loads(open("runs/text/config.json").read())["model"]["name"] == "own_code.py:text(width=12)"
    named = ["--run", "runs/text", *model]
    assert here("generate", *named, "--prompt", "def", "--tokens", "4")[0] == 0


def test_commands_that_take_an_engine_of_one_s_own(here, virtual, tmp_path):
    engine = ["--model", "own_code.py:Matrix"]
    assert "agrees to" in virtual(2, "verify", *engine, "--mesh", "data=1,model=2", "--input-shape", "4,5").out
    out = here("analyze", *engine, "--data", "numbers.npz", "--mesh", "data=2,model=2")[1]
    assert "Matrix: 20 parameters on 4 ranks" in out
    here("train", *NUMBERS, "--mesh", "data=1,model=1", "--steps", "2", "--run", "runs/m", *QUIET)
    np.save("x.npy", np.eye(5, dtype=np.float32))
    axes = ["--mesh", "data=1,model=2", "--input", "x.npy"]
    run = ["--run", "runs/m", "--trust-code"]
    virtual(2, "infer", *run, *axes, "--output", "y.npy")
    assert here("infer", *run, "--input", "x.npy", "--output", "alone.npy")[0] == 0  # on the run's mesh
    np.testing.assert_allclose(np.load("alone.npy"), np.load("y.npy"), rtol=1e-5)
    assert np.load("y.npy").shape == (5, 4) and np.load("y.npy").any()
    virtual(2, "infer", *engine, *axes, "--output", "z.npy", "--checkpoint", "runs/m")
    assert (np.load("z.npy") == np.load("y.npy")).all()
    for source in (run, engine):
        uneven = ["infer", *source, "--mesh", "data=1", "--shares", "data=1", "--input", "x.npy", "--output", "z.npy"]
        assert "an engine of your own has a layout of its own" in here(*uneven)[2]
    code, _, error = here(
        "analyze", "--model", "own_code.py:ByValue", "--data", "numbers.npz", "--mesh", "data=1,model=1"
    )
    line = next(number for number, text in enumerate(CODE.splitlines(), 1) if "x.sum() > 0" in text)
    assert code == 2 and f"own_code.py:{line})" in error
    for command in (["inspect"], ["plan", "--ranks", "2"]):
        code, _, error = here(*command, *engine)
        assert code == 2 and "makes an engine, which shards itself; here a Model is needed" in error


def test_a_model_that_is_not_a_function_and_the_other_name_of_the_option(here):
    ready = ["--engine", "own_code.py:ready"]
    assert "own_code.py:ready: 4,340 parameters" in here("inspect", *ready, "--mesh", "model=2")[1]
    assert "a step of rank 0" in here("show", "communication", *ready, "--mesh", "data=2", "--batch-size", "2")[1]
    found = here("show", "sharding", *ready, "--param", "block0/mlp/w0", "--mesh", "model=2")[1]
    assert 'block0/mlp/w0 "d f/model", shape 8 x 12, mesh model=2' in found
    assert here("show", "experts", *ready, "--mesh", "data=2")[2].endswith(
        "has no layer with experts; try gpt-moe-nano\n"
    )
    assert "got an unexpected keyword argument 'width'" in here("inspect", *ready, "--set", "width=3")[2]


def test_text_of_code_and_its_checkpoint(here, code):
    model = ["--model", "own_code.py:text", "--set", "width=12"]
    assert here("train", *model, "--data", str(code), "--steps", "1", "--run", "runs/text", *QUIET)[0] == 0
    saved = ["--checkpoint", "runs/text"]
    for command in (["generate", "--prompt", "def", "--tokens", "4"], ["eval", "--text", "a text"]):
        assert here(*command, *model, *saved)[:2] == here(*command, "--run", "runs/text", "--trust-code")[:2]
        code_, _, error = here(*command, *model)
        assert code_ == 2 and "is code, without weights: give --checkpoint PATH, or --run DIR" in error
        code_, _, error = here(*command, "--run", "runs/text", *saved)
        assert code_ == 2 and "--checkpoint goes with --model FILE.py:NAME" in error
    assert "F32[12, 12]" in here("checkpoint", "inspect", "runs/text", "--arrays")[1]


def test_the_search_gives_the_error_of_a_layer_that_is_wrong(here):
    code_, _, error = here("plan", "--model", "own_code.py:doubling", "--ranks", "2", "--seconds", "1")
    assert code_ == 2 and "Doubling.forward" in error and "outputs of float64 from inputs of float32" in error


def test_what_an_engine_cannot_do_is_said_of_it(here):
    code_, _, error = here("bench", "layers", *NUMBERS)
    assert code_ == 2 and "bench layers: own_code.py:Matrix is not made of layers; use bench train" in error


def test_a_plan_trains_the_code_that_it_was_made_for(here, virtual, code):
    model = ["--model", "own_code.py:classifier", "--set", "hidden=8"]
    assert here("plan", *model, "--ranks", "2", "--mesh", "data=2", "--output", "plan.json")[0] == 0
    job = ["train", "--plan", "plan.json", "--data", "classes.npz", "--steps", "1", *QUIET]
    virtual(2, *job, *model, "--run", "runs/planned")
    assert (code.parent / "runs" / "planned" / "metrics.jsonl").exists()
    code.write_text(CODE + "\n")
    error = virtual(2, *job, "--trust-code", "--run", "runs/trusted").err
    assert "own_code.py differs from the code that plan.json: model records, SHA-256 " in error


def test_code_of_a_run_that_has_changed_is_told_of_and_runs_when_the_user_permits_it(here, code):
    job = ["train", *CLASSES, *QUIET, "--steps", "4"]
    assert here(*job, "--stop-at", "2", "--run", "runs/changed")[0] == 0
    before, source = (hashlib.sha256(text.encode()).hexdigest() for text in (CODE, CODE + "\n"))
    code.write_text(CODE + "\n")
    resume = ["train", "--resume", "--run", "runs/changed", "--stop-at", "3"]
    _, _, error = here(*resume, "--trust-code")
    assert f"names code, which runs: own_code.py:classifier, {code}, SHA-256 {source}" in error
    assert f"{code} differs from the code that runs/changed/config.json: model records, SHA-256 {before}" in error
    config = json.loads(open("runs/changed/config.json").read())
    assert config["model"]["code"] == source
    code.write_text(CODE)
    _, _, error = here(*resume[:-2], "--model", "own_code.py:classifier")
    assert f"records, SHA-256 {source}" in error and "which runs" not in error
    code_, _, error = here(*resume, "--model", "own_code.py:text")
    said = "the model of runs/changed is own_code.py:classifier, not {}: name it, with its arguments, by --model "
    assert code_ == 2 and said.format("own_code.py:text") + "own_code.py:classifier" in error
    np.save("x.npy", np.zeros((1, 5)))
    infer = ["infer", "--run", "runs/changed", "--input", "x.npy", "--output", "y.npy", "--model"]
    assert here(*infer, "own_code.py:classifier")[0] == 0
    assert said.format("own_code.py:text") in here(*infer, "own_code.py:text")[2]
    named = config["model"]["name"] = "own_code.py:classifier(hidden=8)"
    Path("runs/changed/config.json").write_text(json.dumps(config))
    for command in (resume, infer[:-1]):
        for without in ([], ["--model", "own_code.py:classifier"]):
            assert f"--model '{named}'" in here(*command, *without)[2]


MISTAKES = {
    "no file": (["--model", "none.py:classifier"], "none.py cannot be read: No such file"),
    "no such name": (
        ["--model", "own_code.py:clasifier"],
        "own_code.py has no attribute 'clasifier'; did you mean 'classifier'?",
    ),
    "no name": (["--model", "own_code.py"], "write what makes the model, as in own_code.py:NAME; there are: "),
    "no literal": (["--model", "own_code.py:classifier(x)"], "own_code.py:classifier(x): malformed node or string"),
    "no model": (["--model", "own_code.py:no_model"], "returned a int; it must return a Model"),
    "an argument": (
        ["--model", "own_code.py:needs"],
        "needs needs width: give values, as in MODULE:NAME(6, 11) or --set",
    ),
    "unknown argument": (
        ["--model", "own_code.py:classifier", "--set", "hiden=3"],
        "unexpected keyword argument 'hiden'",
    ),
    "no value": (["--model", "own_code.py:classifier", "--set", "hidden"], "--set hidden: write --set name=value"),
    "not code": (["--model", "gpt-nano", "--set", "width=3"], "--set goes with --model FILE.py:NAME"),
    "dropout": (
        ["--model", "own_code.py:classifier", "--dropout", "0.1"],
        "dropout 0.1 does not go with own_code.py:cl",
    ),
    "no data": (
        ["--model", "own_code.py:Matrix"],
        "is an engine of your own: give --data FILE.npz, with arrays x and y",
    ),
    "a composition": (
        [*NUMBERS, "--zero", "1"],
        "makes an engine, has a sharding of its own: it does not go with --zero",
    ),
    "other rows": (["--model", "own_code.py:classifier", "--data", "rows.npz"], "x has 4 samples and y has 3 samples"),
    "no y": (["--model", "own_code.py:classifier", "--data", "no_y.npz"], "it has no array y; save samples as x"),
    "not finite": (["--model", "own_code.py:classifier", "--data", "nan.npz"], "x[1] has numbers that are not finite"),
    "objects": (
        ["--model", "own_code.py:classifier", "--data", "text.npz"],
        "y is <U1[2]; save numbers, samples first",
    ),
}


@pytest.mark.parametrize("options, words", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(options, words, here):
    np.savez("rows.npz", x=np.zeros((4, 5)), y=np.zeros(3, int))
    np.savez("no_y.npz", x=np.zeros((4, 5)))
    np.savez("nan.npz", x=np.array([[0.0], [np.nan]]), y=np.zeros(2, int))
    np.savez("text.npz", x=np.zeros((2, 5)), y=np.array(["a", "b"]))
    code, _, error = here("train", *options, "--mesh", "data=1,model=1")
    assert code == 2 and words in error and len(error.strip().splitlines()) == 1


def test_names_of_code(tmp_path):
    assert is_code("m:f") and is_code("a/b.py:F(1, x='(')") and is_code("pack.mod:F")
    assert not any(map(is_code, ["gpt-nano", "org/name", "m:", ":f", "m:3", "a.py:f(1", "C:/x/y"]))
    (tmp_path / "a:b").write_text("a file")
    assert not is_code("a:b")
    assert is_code(f"m:f({'1, ' * 999})")  # longer than a file's name can be
    assert with_arguments("m:f(1, b=2)", ["c=x y", "d=[3]"]) == "m:f(1, b=2, c='x y', d=[3])"


def test_a_digest_is_taken_without_running_the_code(code):
    (code.parent / "pack").mkdir()
    (code.parent / "pack" / "__init__.py").write_text("raise SystemExit")
    (code.parent / "pack" / "inner.py").write_text("raise SystemExit")
    assert digest_of("pack.inner:f") == hashlib.sha256(b"raise SystemExit").hexdigest()
    (code.parent / "plain" / "inner").mkdir(parents=True)  # packages without __init__.py
    (code.parent / "plain" / "inner" / "most.py").write_text("raise SystemExit")
    assert digest_of("plain.inner.most:f") == digest_of("pack.inner:f")
    config = ModelConfig("pack.inner:f")
    assert config.code == digest_of("pack.inner:f")
    assert config.changed(dtype="float64").code == config.code


def test_the_class_of_the_readme_is_trained_and_continued_and_served(here):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    program = next(block for block in blocks if "class Linear" in block)
    Path("readme_class.py").write_text(program[: program.index("engine = Linear()")])
    x = np.load("numbers.npz")["x"]
    np.savez("samples.npz", x=x, y=x[:, :1])
    np.save("x.npy", x[:2])
    model, run = ["--model", "readme_class.py:Linear"], ["--run", "runs/linear"]
    for command in (
        ["train", *model, *run, "--data", "samples.npz", "--steps", "1", *QUIET],
        ["train", "--resume", *run, *model, "--steps", "2"],
        ["infer", *run, *model, "--input", "x.npy", "--output", "y.npy"],
    ):
        code, _, error = here(*command)
        assert code == 0, error
    assert np.load("y.npy").shape == (2, 1)
    sys.modules.pop("readme_class")


def test_verify_finds_a_gradient_of_own_code_that_is_wrong_on_every_mesh(here):
    code, output, _ = here("verify", "--model", "own_code.py:wrong", "--batch-size", "2", "--length", "4")
    assert code == 1 and "wrong on one device, too" in output
    assert "own is the last layer with a wrong one: look at its backward first" in output
