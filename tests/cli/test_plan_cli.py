"""``plan``: JSON for programs, what nothing fits, mistakes in one line."""

import json
import re

import pytest

from spmd_engine.cli import main
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.planning import analyze
from spmd_engine.planning.plan_result import PlanFile
from spmd_engine.training import TrainConfig
from support.command_line import QUIET

pytestmark = pytest.mark.usefixtures("narrow")

FIXED = ("plan", "--machine", "cpu", "--ranks", "2", "--model", "mlp", "--batch-size", "16", "--mesh", "data=2")


def test_a_composition_that_is_given_is_looked_at(capsys, tmp_path):
    file = tmp_path / "plan.json"
    main([*FIXED, "--zero", "1", "--json", "--output", str(file)])
    found = json.loads(capsys.readouterr().out)
    assert found["composition"]["mesh"] == {"data": 2}
    assert found["composition"]["zero"] == 1
    assert len(found["peak_bytes"]) == 2
    assert found["bytes_sent"] > 0
    assert found["seconds"] > 0
    plan = PlanFile.read(file)
    assert (plan.ranks, plan.model.name, plan.composition.zero) == (2, "mlp", 1)
    assert plan.bytes_sent == found["bytes_sent"]


@pytest.mark.parametrize("model, axes, options", [
    ("gpt-nano", {"context": 2}, {}),
    ("gpt-nano", {"context": 2}, {"context_method": "ulysses"}),
    ("resnet-nano", {"rows": 2}, {"reshard_after": 1}),
])  # fmt: skip
def test_a_given_composition_is_planned_as_it_is_trained(model, axes, options, capsys):
    """Rings where sequences are cut, unless another method is named; images cut anew where that is asked for."""
    mesh = ",".join(f"{axis}={size}" for axis, size in axes.items())
    named = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    main(["plan", "--machine", "cpu", "--model", model, "--batch-size", "4", "--mesh", mesh, "--json", *named])
    found = json.loads(capsys.readouterr().out)
    trained = analyze(ModelConfig(model), axes, ParallelConfig(**options), batch_size=4)
    assert found["bytes_sent"] == trained.bytes_sent
    assert found["peak_bytes"] == trained.peak_bytes_by_rank()


def test_adapters_are_planned_for_and_the_plan_is_run(here, tmp_path, caplog):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(97, 107)) * 200)
    data = ("--data", str(text), *QUIET)
    assert here("train", "--model", "llama-nano", "--steps", "0", *data, "--run", "runs/base")[0] == 0
    assert here("checkpoint", "export", "runs/base", "./base", "--format", "huggingface")[0] == 0
    assert "the folder has no tokenizer" in caplog.text
    plan = ("plan", "--machine", "cpu", "--ranks", "1", "--batch-size", "2", "--mesh", "data=1", "--model", "./base")
    plan += ("--length", "32", "--optimizer", "sgd")
    code, out, error = here(*plan, "--lora-rank", "2", "--json", "--output", "plan.json")
    assert code == 0, error
    assert json.loads(out)["peak_bytes"][0] < json.loads(here(*plan, "--json")[1])["peak_bytes"][0]
    assert PlanFile.read("plan.json").model.lora.rank == 2
    code, _, error = here("train", "--plan", "plan.json", "--steps", "1", *data, "--run", "runs/a")
    assert code == 0, error
    job = TrainConfig.read("runs/a/config.json")
    assert (job.model.lora.rank, job.data.length, job.training.optimizer) == (2, 32, "sgd")
    code, _, error = here("train", "--plan", "plan.json", "--lora-rank", "4", "--steps", "1", *data)
    assert code == 2 and "--lora-rank 4 with --plan plan.json, which has 2" in error


def test_where_it_does_not_fit_the_reason_comes_last(capsys):
    with pytest.raises(SystemExit) as end:
        main([*FIXED, "--memory", "1KiB"])
    assert end.value.code == 1
    assert "memory at most 1.00 KiB" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--machine", "nowhere.toml"), "nowhere.toml"),
        (("--model", "nothing"), "unknown model 'nothing'"),
        (("--fallback", "none,split"), "fallback 'none': choose split, offload, assign, or none alone"),
        (("--machine", "cpu", "--ranks", "65"), "64 ranks, fewer than --ranks 65"),
        (("--ranks", "4", "--mesh", "data=2"), "has 2 ranks, and --ranks is 4"),
        (("--memory", "much"), "cannot read 'much' as bytes"),
        (("--latency", "0"), "--latency 0: it must be above 0"),
        (("--ranks", "0"), "--ranks 0"),
        (("--axes", ","), "--axes ',': name axes, as in data,model"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(options, said, capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", *options])
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_a_plan_for_other_ranks_or_another_model_is_refused(capsys, tmp_path):
    file = tmp_path / "plan.json"
    PlanFile(ranks=2).write(file)
    for options, said in ((("--model", "gpt-nano"), "a plan for 2 ranks, but the job has 1"),):
        with pytest.raises(SystemExit) as end:
            main(["train", "--plan", str(file), *options])
        assert end.value.code == 2
        assert said in capsys.readouterr().err


def test_precisions_are_compared(capsys, tmp_path):
    """The faster one is chosen, and is in the plan file and the command."""
    searched = ["plan", "--machine", "a100", "--ranks", "2", "--model", "gpt-nano", "--axes", "data", "--zero", "0"]
    searched += ["--micro-batches", "1", "--recompute", "none"]
    main([*searched, "--precision", "float32,bfloat16", "--json", "--output", str(tmp_path / "plan.json")])
    found = json.loads(capsys.readouterr().out)
    wide, half = found["compared"]
    assert (wide["precision"], half["precision"], found["precision"]) == ("float32", "bfloat16", "bfloat16")
    assert all(half[need] < wide[need] for need in ("seconds", "peak_bytes"))
    assert PlanFile.read(tmp_path / "plan.json").model.dtype == "bfloat16"
    main([*searched, "--precision", "bfloat16, float32"])
    page = capsys.readouterr().out
    assert page.index("bfloat16 (chosen)") < page.index(" float32 ") and "--precision bfloat16" in page
    main([*FIXED, "--dtype", "float32,float64", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["precision"] == "float32" and found["compared"][0]["bytes_sent"] == found["bytes_sent"]
    assert found["compared"][1]["bytes_sent"] == pytest.approx(2 * found["bytes_sent"], rel=0.001)


@pytest.mark.parametrize("words, error", [
    (["--precision", "float32,bfloat17"], "did you mean 'bfloat16'?"),
    (["explain", "--precision", "float32,bfloat16"], "it explains one plan; give one"),
])  # fmt: skip
def test_precisions_that_cannot_be_planned(words, error, here):
    code, _, text = here("plan", "--ranks", "2", *words)
    assert code == 2 and error in text and text.count("\n") == 1


def test_the_command_of_a_plan_names_code_as_it_was_given(capsys, tmp_path):
    code = tmp_path / "planned_code.py"
    code.write_text("from spmd_engine.models import mlp as model\n")
    command = ["plan", "--machine", "cpu", "--ranks", "1", "--model", f"{code}:model", "--batch-size", "4"]
    main([*command, "--seconds", "1", "--axes", "data", "--micro-batches", "1"])
    assert f"train --model {code}:model --mesh" in capsys.readouterr().out


def test_a_machine_file_that_is_missing_is_named(capsys, monkeypatch):
    monkeypatch.setenv("SPMD_MACHINE", "/nowhere.toml")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--ranks", "2"])
    assert "SPMD_MACHINE is /nowhere.toml, where no file is: run 'calibrate'" in capsys.readouterr().err


def test_plans_for_the_least_communication_show_their_bytes(capsys):
    main(["plan", "--model", "mlp", "--ranks", "2", "--machine", "cpu", "--goal", "communication", "--seconds", "1"])
    assert re.search(r"^ plan +step +sent +memory", capsys.readouterr().out, re.MULTILINE)
