"""A file never makes code run: the user does, by name or by --trust-code. Code that ends the program is an error."""

import json
import marshal
import os
import sys
from dataclasses import replace
from hashlib import sha256
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_engine.adaptive import planner_process
from spmd_engine.adaptive.adapter import Adapter
from spmd_engine.cli.options import permitted
from spmd_engine.configuration import settings_of
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.reshape import Shape
from spmd_engine.errors import UsageError
from spmd_engine.jobs import run_job
from spmd_engine.models.user_code import code_named, digest_of
from spmd_engine.planning.plan_result import PlanFile
from spmd_engine.runtime.supervisor import Supervisor
from spmd_engine.training import TrainConfig
from spmd_engine.training.train_config import AdaptConfig
from support.command_line import QUIET, TEXT

pytestmark = pytest.mark.usefixtures("narrow")
PLANTED = """
import pathlib
pathlib.Path("ran").touch()
from spmd_engine.layers import MLP, Embedding, Head, Residual, LayerNorm
from spmd_engine.models import Model, token_loss


def text(width=8):
    layers = (("embedding", Embedding(257, width)), ("own", Residual(LayerNorm(width), MLP(width, 12))))
    layers += (("head", Head(257, width)),)
    return Model("text", layers, "b s", "b s v", "b s", token_loss(257), context=16, vocabulary=257)
"""
NAME = "planted_code.py:text"


@pytest.fixture
def planted(r, tmp_path, monkeypatch):
    """A run, a job and a plan that name code, which makes a file if it is imported, with its SHA-256."""
    (tmp_path / "planted_code.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "planted_code", raising=False)
    config = json.loads((r / "config.json").read_text())
    config["model"] |= {"name": NAME, "code": digest_of(NAME)}
    config["adapt"] = {}
    config["composition"]["mesh"] = {"data": 1}
    (r / "config.json").write_text(json.dumps(config))
    (tmp_path / "job.json").write_text(json.dumps(config))
    PlanFile(model=ModelConfig(NAME), composition=ParallelConfig(mesh={"data": 1})).write("plan.json")
    (r / "trace.json").write_text(json.dumps({"traceEvents": [{"pid": 0, "name": "a", "ts": 0}]}))
    np.save("x.npy", np.zeros((1, 4), int))
    yield config
    sys.modules.pop("planted_code", None)


JOB, RUN = ["--config", "job.json"], ["--run", "runs/r"]
#: Commands that only look, and so never import the code, and commands that refuse it, since they need it.
LOOK = {
    "report": ["report", "runs/r"],
    "monitor": ["monitor", "runs/r", "--once"],
    "checkpoint inspect": ["checkpoint", "inspect", "runs/r"],
    "checkpoint verify": ["checkpoint", "verify", "runs/r"],
    "checkpoint digest": ["checkpoint", "digest", "runs/r"],
    "checkpoint reshard": ["checkpoint", "reshard", "runs/r", "resharded"],
    "checkpoint export": ["checkpoint", "export", "runs/r", "whole.safetensors"],
}
REFUSE = {
    "inspect": ["inspect", *JOB],
    "show sharding": ["show", "sharding", *JOB, "--param", "own/w0"],
    "show experts": ["show", "experts", *JOB],
    "show communication": ["show", "communication", *JOB],
    "analyze": ["analyze", *JOB],
    "verify": ["verify", *JOB],
    "plan --compare": ["plan", "--compare", "runs/r"],
    "bench layers": ["bench", "layers", *JOB],
    "train --resume": ["train", "--resume", *RUN],
    "train --config": ["train", *JOB],
    "train --plan": ["train", "--plan", "plan.json", *TEXT],
    "generate": ["generate", *RUN, "--prompt", "a"],
    "eval": ["eval", *RUN, "--text", "a text"],
    "infer": ["infer", *RUN, "--input", "x.npy", "--output", "y.npy"],
    "join": ["join", "runs/r"],
}


@pytest.mark.parametrize("command", [*LOOK.values(), *REFUSE.values()], ids=[*LOOK, *REFUSE])
def test_no_command_runs_code_that_a_file_names(command, planted, here, monkeypatch):
    monkeypatch.setattr(run_job, "runs", lambda folder: True)  # as if its job were running
    code, _, error = here(*command)
    assert not os.path.exists("ran") and "planted_code" not in sys.modules
    if command in LOOK.values():
        assert code == 0, error
    else:
        assert code == 2 and len(error.splitlines()) == 1, error
        assert f"names code, {NAME}, and a file never makes code run: to run it, name it yourself" in error
        has_option = command[0] in ("train", "generate", "eval", "infer", "join", "bench")
        assert (f"by --model {NAME}, or give --trust-code" in error) == has_option


def test_migrate_never_runs_the_code_of_a_run_or_of_a_plan(planted, here):
    assert here("migrate", "runs/r", "--plan", "plan.json")[0] == 2  # no job runs
    assert not os.path.exists("ran")


def test_a_report_says_what_it_leaves_out(planted, here):
    here("report", "runs/r", "--output", "report.html")
    text = Path("report.html").read_text()
    assert "The model is code, which a report does not run: its parameters are not shown." in text
    assert "mesh data=1" in text  # the picture stays


#: Files that name code in other ways: as an old name of the field, without a SHA-256, as an old list of options.
FILES = {
    "an old name": lambda config: {"version": config["version"], "model": {"engine": NAME}},
    "no digest": lambda config: config | {"model": {"name": NAME}},
    "options": lambda config: {"model": NAME, "seed": 0, "dtype": "float32"},
    "options, twice": lambda config: {"model": "gpt-nano", "engine": NAME, "seed": 0, "dtype": "float32"},
    "an adapter": lambda config: config | {"model": config["model"] | {"adapter": "runs"}},
}


@pytest.mark.parametrize("write", FILES.values(), ids=FILES)
def test_no_form_of_a_file_makes_code_run(write, planted, here):
    Path("job.json").write_text(json.dumps(write(planted)))
    for command in REFUSE["inspect"], REFUSE["verify"], REFUSE["train --config"]:
        code, _, error = here(*command)
        assert code == 2 and "a file never makes code run" in error and not os.path.exists("ran")


def test_a_checkpoint_that_names_code_does_not_make_it_run(planted, here):
    command = ["generate", "--prompt", "def", "--tokens", "2", *RUN]
    train = ["train", "--model", NAME, "--data", "planted_code.py", "--steps", "1", *QUIET]
    assert here(*train, "--run", "runs/own")[0] == 0
    os.remove("ran"), os.remove("runs/own/config.json"), sys.modules.pop("planted_code")
    command[-1] = "runs/own"
    code, _, error = here(*command)
    assert code == 2 and "runs/own/checkpoints/step-00000001: model names code" in error and not os.path.exists("ran")
    code, _, error = here(*command, "--trust-code")
    assert code == 0 and os.path.exists("ran")
    path, digest = Path("planted_code.py").resolve(), digest_of(NAME)
    assert f"names code, which runs: {NAME}, {path}, SHA-256 {digest}" in error and "differs" not in error


@pytest.mark.parametrize("name", ["own.py:made", "own:made"])
def test_the_file_that_has_the_sha_256_runs_and_none_beside_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = b"def made():\n    return 'source'\n"
    Path("own.py").write_bytes(source)
    other = compile("def made():\n    return 'compiled'\n", "own.py", "exec")
    cached = Path(cache_from_source("own.py"))
    cached.parent.mkdir()
    cached.write_bytes(MAGIC_NUMBER + (1).to_bytes(4, "little") + source_hash(source) + marshal.dumps(other))
    if name == "own.py:made":
        Path("own").mkdir()
        Path("own", "__init__.py").write_text("def made():\n    return 'package'\n")
    try:
        assert code_named(name, digest=sha256(source).hexdigest(), named_in="")() == "source"
    finally:
        sys.modules.pop("own", None)


def test_what_is_said_of_trusted_code_cannot_control_a_terminal(planted, capsys):
    model = ModelConfig.from_json({"name": f"{NAME}(\x1b[2J\n)"}, "a.json")
    assert not permitted(model, None, trust=True).named_in
    error = capsys.readouterr().err
    assert f"names code, which runs: '{NAME}(\\x1b[2J\\n)', {Path('planted_code.py').resolve()}, SHA-256" in error
    assert "\x1b" not in error and len(error.splitlines()) == 2


def test_the_experts_of_a_run_are_shown_if_the_user_names_its_code(planted, here, monkeypatch):
    monkeypatch.setattr("spmd_engine.observability.shardings.mean_loads", lambda folder, steps: {})
    for named in [], JOB:
        assert "a file never makes code run" in here("show", "experts", *RUN, *named)[2] and not os.path.exists("ran")
    assert "has no layer with experts" in here("show", "experts", *RUN, "--model", NAME)[2]


def test_the_planner_gets_no_code_that_the_job_may_not_run():
    adapter, name = Adapter(AdaptConfig()), "os:getcwd"
    for model, code in (ModelConfig.from_json({"name": name}, "a.json"), ""), (ModelConfig(name), name):
        adapter.opened(SimpleNamespace(job=TrainConfig().changed(model=model)), 0, [])
        assert adapter._code == code


def test_a_file_cannot_say_that_its_code_is_permitted():
    assert "model_named_in" not in settings_of(TrainConfig) and "named_in" not in ModelConfig().as_json()
    for content in {"name": "os:getcwd", "named_in": ""}, {"name": "os:getcwd", "_named_in": ""}:
        with pytest.raises(UsageError, match="unknown field"):
            ModelConfig.from_json(content)
    for where in "a.json", "":
        model = ModelConfig.from_json({"name": "os:getcwd", "code": digest_of("os:getcwd")}, where)
        for copied in model, model.changed(dtype="float64"), replace(model, seed=3), ModelConfig(**vars(model)):
            with pytest.raises(UsageError, match="a file never makes code run"):
                copied.build(ParallelConfig())
        assert model == ModelConfig("os:getcwd")


def test_a_name_that_becomes_code_later_is_not_permitted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "os:system('touch ran')"
    Path(name).touch()  # now it is the name of a file
    model = ModelConfig.from_json({"name": name}, "a.json")
    Path(name).unlink()
    with pytest.raises(UsageError, match="a file never makes code run"):
        model.build(ParallelConfig())
    assert not Path("ran").exists()


def test_ranks_and_processes_of_a_job_permit_each_other_only_code_of_the_same_name(planted, monkeypatch):
    own = ModelConfig(NAME)
    sent = ModelConfig.from_json(own.as_json(), "the order")
    assert sent.permitted_by(own).build(ParallelConfig()).name == "text"
    other = ModelConfig.from_json(ModelConfig("os:getcwd").as_json(), "the order")
    for model in sent, other.permitted_by(own), sent.permitted_by(sent):
        with pytest.raises(UsageError, match="the order names code"):
            model.build(ParallelConfig())

    monkeypatch.setattr(planner_process, "SECONDS", 0.01)
    shape = Shape(ParallelConfig(mesh={"data": 2}), (0, 1)).request.as_json()
    question = {"model": own.as_json(), "optimizer": "sgd", "batch_size": 4, "micro_batches": 1, "length": 4}
    question |= {"shape": shape, "speeds": [1.0, 1.0], "used": [0.5, 0.5], "most": 0.9, "limits": None}
    assert planner_process.answer(question, NAME)
    with pytest.raises(UsageError, match="a file names code"):
        planner_process.answer(question, "os:getcwd")


def test_helper_ranks_compute_layers_of_the_user_s_code(planted, virtual):
    job = ["--model", NAME, "--mesh", "data=1", "--assign", "own:rank1", "--batch-size", "2", "--steps", "1"]
    virtual(2, "train", *job, "--data", "planted_code.py", "--run", "runs/helped", *QUIET)
    assert Path("runs/helped/metrics.jsonl").read_text()


def test_a_launched_run_is_resumed_by_the_name_that_the_user_gave():
    given = ["train", "--model", NAME, "--run", "r", "--config", "job.json"]
    command = Supervisor(1, given, newest=lambda: Path("step-00000001")).command(1)
    assert command[command.index("train") :] == ["train", "--model", NAME, "--run", "r", "--resume"]
    command = Supervisor(1, ["train", "--run", "r", "--trust-code"], newest=lambda: Path("step-00000001")).command(1)
    assert command[-2:] == ["--trust-code", "--resume"]


def test_the_name_of_a_logger_is_the_user_s(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert code_named("os:getcwd", "--logger", named_in="")() == str(tmp_path)
    with pytest.raises(UsageError, match="config.json names code, os:getcwd"):
        code_named("os:getcwd", "--logger", named_in="config.json")


# --- Own code that ends the program


ENDS = {
    "a bare SystemExit": "raise SystemExit",
    "sys.exit(0)": "import sys; sys.exit(0)",
    "exit()": "exit()",
    "another BaseException": "raise type('Over', (BaseException,), {})('all\\nis done')",
    "GeneratorExit": "raise GeneratorExit",
    "click's": "import click; raise click.exceptions.Exit(0)",
}


@pytest.mark.parametrize("body", ENDS.values(), ids=ENDS)
def test_code_that_ends_the_program_is_an_error_of_one_line(body, here, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in {"on_import": body, "on_call": f"def E():\n    {body}"}.items():
        (tmp_path / f"{name}.py").write_text(text)
        for command in ["verify", f"{name}.py:E", "--input-shape", "2,2"], ["inspect", "--model", f"{name}.py:E"]:
            code, _, error = here(*command)
            sys.modules.pop(name, None)
            assert code == 2 and len(error.splitlines()) == 1 and " ended the program (" in error, error
            assert f"{name}.py" in error or "E: its code" in error


ENGINE = """
import sys
import numpy as np
from spmd_engine import ShardedEngine


class Ends(ShardedEngine):
    input_sharding = output_sharding = target_sharding = "b/data i"

    def __init__(self):
        self.parameters = {"w": self.block("w", np.ones((2, 2)))}

    def load_checkpoint(self, params):
        self.parameters = {"w": self.block("w", params["w"])}

    def forward(self, x):
        sys.exit(0)

    def backward(self, dy):
        return {}


class Logs:
    def start(self, config, facts):
        sys.exit(0)
"""


def test_code_that_ends_the_program_later_is_an_error_too(here, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "ends.py").write_text(ENGINE)
    np.savez(tmp_path / "data.npz", x=np.ones((40, 2)), y=np.ones((40, 2)))
    line = next(number for number, text in enumerate(ENGINE.splitlines(), 1) if "sys.exit" in text)
    train = ["train", "--model", "ends.py:Ends", "--data", "data.npz", "--no-enforce", "--requeue", *QUIET]
    for command in ["verify", "ends.py:Ends", "--input-shape", "2,2"], train:
        code, _, error = here(*command)
        assert code == 2, error
        assert f"{tmp_path}/ends.py:{line}: this code ended the program (SystemExit: 0)" in error.splitlines()[-1]
    sys.modules.pop("ends")
