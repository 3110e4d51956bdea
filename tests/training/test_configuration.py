"""Configurations: checked where they are made, the same in JSON, and one line for a mistake, naming file and field."""

import json
import re

import option_tables
import pytest

from spmd_engine.configuration import settings_of
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import Mixture
from spmd_engine.models.names import build_model
from spmd_engine.training.train_config import FIXED, StepConfig, TrainConfig
from spmd_engine.training.workload import rate_of

JOB = TrainConfig.of(
    model="gpt-mini", dropout=0.1, steps=7, zero=3, mesh={"data": 2, "model": 4}, data="texts", sample=0
)


# --- JSON


def test_a_job_in_json_is_the_job(tmp_path):
    JOB.write(tmp_path / "job.json")
    assert TrainConfig.read(tmp_path / "job.json") == JOB


def test_what_json_leaves_out_has_its_default():
    assert TrainConfig.from_json({"version": 1, "training": {"steps": 3}}) == TrainConfig.of(steps=3)


@pytest.mark.parametrize(
    "content, message",
    [
        ({"version": 2}, "version is 2; this program reads version 1"),
        ({}, "version is null; this program reads version 1"),
        ([], "must be an object"),
        ({"version": 1, "sped": 3}, "unknown field 'sped'"),
        ({"version": 1, "training": {"steps": 3.5}}, "training: steps is 3.5: it must be a whole number"),
        ({"version": 1, "training": {"steps": True}}, "training: steps is True: it must be a whole number"),
        ({"version": 1, "training": {"step": 3}}, "training: unknown field 'step'; did you mean 'steps'. There are"),
        ({"version": 1, "training": 3}, "training: it must be an object"),
        ({"version": 1, "training": {"momentum": 1.5}}, "training: momentum is 1.5: it must be from 0 to 1"),
        ({"version": 1, "training": {"learning_rate": float("nan")}}, "learning_rate is nan: it must be finite"),
        ({"version": 1, "model": {"dropout": 1}}, "model: dropout is 1.0: it must be from 0 below 1"),
        (
            {"version": 1, "model": {"dtype": "int8"}},
            "model: dtype is 'int8'; there are: float32, bfloat16, float16, float64",
        ),
        ({"version": 1, "model": {"name": None}}, "model: name is None: it must be a text"),
        ({"version": 1, "composition": {"mesh": {"data": "two"}}}, "composition: mesh axis 'data' has size 'two'"),
        ({"version": 1, "composition": {"compress": "zip"}}, "composition: .*zip"),
        ({"version": 1, "composition": {"stages": "odd"}}, "composition: cannot read stages 'odd'"),
    ],
)
def test_a_mistake_is_one_line_that_names_file_and_field(tmp_path, content, message):
    (tmp_path / "job.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=message) as caught:
        TrainConfig.read(tmp_path / "job.json")
    assert str(caught.value).startswith(f"{tmp_path}/job.json") and "\n" not in str(caught.value)


def test_an_empty_value_is_refused_but_read_from_files_of_older_versions():
    with pytest.raises(UsageError, match="offload_dir is empty: give a value, or leave it out"):
        TrainConfig.of(offload_dir="")
    job = TrainConfig.from_json({"version": 1, "composition": {"offload_dir": ""}})
    assert job.composition.offload_dir is None


def test_a_file_that_is_no_json_is_one_line(tmp_path):
    (tmp_path / "job.json").write_text("[model]\nname = 'mlp'\n")
    with pytest.raises(UsageError, match=r"JSON: Expecting value: line 1 column 2 .*; a job is a JSON file"):
        TrainConfig.read(tmp_path / "job.json")
    (tmp_path / "job.json").write_text("{")
    for path in (tmp_path / "job.json", tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="cannot be read as JSON"):
            TrainConfig.read(path)


def test_a_configuration_from_before_there_were_versions_is_understood():
    flat = {"model": "mlp", "seed": 3, "dtype": "float64", "data": None, "mesh": "data=2,model=2", "zero": 1}
    facts = {"files": 4, "sha256": "ab"}
    job = TrainConfig.from_json(flat | {"steps": 5, "corpus": facts}, "config.json")
    expected = TrainConfig.of(model="mlp", seed=3, dtype="float64", mesh={"data": 2, "model": 2}, zero=1, steps=5)
    assert job.changed(corpus=None) == expected and job.corpus.as_json() == facts


# --- values


def test_values_are_checked_where_a_configuration_is_made():
    with pytest.raises(UsageError, match="warmup is -1: it must be from 0"):
        StepConfig(warmup=-1)
    assert type(StepConfig(grad_clip=2).grad_clip) is float


def test_texts_with_units_are_values():
    job = TrainConfig.of(timeout="2min", group_cap="64MiB", min_tensor_size="0", mesh="data=2,model=4")
    assert (job.timeout, job.composition.group_cap, job.composition.min_tensor_size) == (120.0, 64 << 20, 0)
    assert job.composition.mesh == {"data": 2, "model": 4}
    assert TrainConfig.from_json({"version": 1, "timeout": "100ms"}).timeout == 0.1
    with pytest.raises(UsageError, match="timeout: cannot read 'soon' as seconds"):
        TrainConfig.of(timeout="soon")
    with pytest.raises(UsageError, match="timeout is 0.01: it must be from 0.1"):
        TrainConfig.of(timeout="10ms")


def test_options_find_their_sections():
    assert JOB.model == ModelConfig("gpt-mini", 0.1) and JOB.data.path == "texts" and JOB.sample == 0
    assert JOB.option("model") == "gpt-mini" and JOB.option("steps") == 7 and JOB.option("sample") == 0
    with pytest.raises(UsageError, match="no option 'stepz'"):
        JOB.with_options(stepz=3)


def test_a_run_goes_on_with_its_own_options_but_for_mesh_device_and_checks():
    job = JOB.with_options(check=False, device="cuda").resumed(sample=9)
    assert job == JOB.with_options(mesh=None, sample=9)


def test_a_resumed_run_keeps_the_curve_of_its_learning_rate():
    begun = TrainConfig.of(steps=10, warmup=2)
    once = begun.resumed(steps=20)
    again = once.resumed(steps=30)
    kept, shorter, stretched = again.resumed(), begun.resumed(steps=5), begun.resumed(steps=20, decay_steps=20)
    rates = [rate_of(job.training) for job in (begun, once, again, kept, shorter)]
    assert all([rate(step) for step in range(30)] == [rates[0](step) for step in range(30)] for rate in rates)
    assert rate_of(stretched.training) == rate_of(TrainConfig.of(steps=20, warmup=2).training)
    assert begun.resumed(steps=10) == begun.resumed() and again.training.decay_steps == 10


def test_a_warmup_that_is_not_given_is_at_most_a_tenth_of_the_steps():
    for steps, warmup in ((600, 50), (60, 6), (5, 0)):
        begun = TrainConfig.of(steps=steps)
        assert rate_of(begun.training).warmup == rate_of(begun.resumed(steps=2 * steps).training).warmup == warmup
    assert rate_of(TrainConfig.of(steps=60, warmup=50).training).warmup == 50


@pytest.mark.parametrize("name", FIXED)
def test_what_decides_what_is_computed_stays(name):
    same = JOB.option(name)
    assert JOB.resumed(**{name: same}).option(name) == same
    with pytest.raises(UsageError, match=f"runs/x was begun with {name} .*: {name} other cannot go on"):
        JOB.resumed("runs/x", **{name: "other"})


# --- compositions on meshes


@pytest.mark.parametrize(
    "options, axes, missing",
    [
        ({"zero": 2}, {"model": 2}, "data, shard or context"),
        ({"sequence_parallel": True}, {"data": 2}, "model"),
        ({"context_method": "ring"}, {"data": 2}, "context"),
        ({"schedule": "1f1b"}, {"pipe": 1}, "pipe"),
        ({"schedule": "interleaved", "chunks": 2}, {"data": 2}, "pipe"),
        ({"stages": "cost"}, {"data": 2}, "pipe"),
    ],
)
def test_what_has_no_effect_is_a_notice_so_that_one_command_serves_every_mesh(options, axes, missing):
    notices = ParallelConfig(**options).check(axes)
    assert len(notices) == len(options) and all(f"has no effect with --mesh {tuple(axes)[0]}=" in n for n in notices)
    assert all(f"no axis {missing}" in notice for notice in notices)
    assert ParallelConfig(**options).check({"data": 2, "model": 2, "context": 2, "pipe": 2}) == []


@pytest.mark.parametrize(
    "options, axes, message",
    [
        ({"chunks": 2}, {"pipe": 2}, "Add --schedule interleaved"),
        ({}, {"replicate": 2}, "Name it data, or add shard"),
        ({"compress": "top-k:0.1", "zero": 1}, {"data": 2}, "Choose float16 or bfloat16"),
        ({"compress": "powersgd:2"}, {"shard": 2}, "Choose float16 or bfloat16"),
        ({"stages": "0,3,7"}, {"pipe": 2}, "2 ascending numbers are needed"),
        ({"schedule": "interleaved", "chunks": 9}, {"pipe": 3}, "too few for 3 stages of 9 chunks"),
    ],
)
def test_what_makes_no_sense_is_refused(options, axes, message):
    with pytest.raises(UsageError, match=message):
        ParallelConfig(**options).check(axes, build_model("gpt-nano"))


def test_what_a_new_mesh_cannot_have_is_left_out_and_named():
    model = build_model("gpt-nano")
    saved = ParallelConfig(zero=3, stages="0,3,7")
    fitted, notices = saved.fitted({"pipe": 2, "data": 2}, model)
    assert fitted == ParallelConfig(zero=3) and "continues without --stages 0,3,7" in notices[0]
    fitted, notices = saved.fitted({"data": 3}, model)
    assert fitted == ParallelConfig(zero=3) and notices == [
        "continues without --stages 0,3,7 (the mesh has no pipeline)"
    ]
    assert saved.fitted({"pipe": 3}, model) == (saved, [])
    saved = ParallelConfig(zero=1, schedule="interleaved", chunks=5)
    fitted, notices = saved.fitted({"pipe": 5}, model)
    assert fitted == ParallelConfig(zero=1, schedule="interleaved") and "--chunks 5" in notices[0]
    fitted, notices = saved.fitted({"pipe": 12}, model)
    assert fitted == ParallelConfig(zero=1) and "--schedule interleaved, --chunks 5" in notices[0]


def test_what_was_given_this_time_is_not_left_out():
    with pytest.raises(UsageError, match="ascending numbers"):
        ParallelConfig(stages="0,3,7").fitted({"pipe": 2}, build_model("gpt-nano"), given={"stages"})


# --- experts


def test_options_about_experts_are_found_in_their_sections():
    job = TrainConfig.of(model="gpt-moe-nano", experts=10, top_k=3, shared_experts=1, dense_layers="0,2", z_loss=0)
    mixture = job.model.mixture
    assert (mixture.experts, mixture.shared, mixture.dense) == (10, 1, "0,2")
    assert (mixture.router.top_k, mixture.router.z_loss, mixture.router.balance_loss) == (3, 0.0, 0.01)
    assert TrainConfig.from_json(json.loads(json.dumps(job.as_json()))) == job
    assert job.option("top_k") == 3 and TrainConfig().option("experts") == 8


def test_a_nested_section_inherits_defaults():
    job = TrainConfig.from_json({"version": 1, "model": {"mixture": {"router": {"top_k": 1}}}})
    assert job.model.mixture.router == Mixture().router.changed(top_k=1)
    with pytest.raises(UsageError, match="top_k is 9, but there are 8 experts"):
        TrainConfig.of(top_k=9)


# --- the page about them


def test_the_tables_of_the_page_are_those_of_the_fields():
    assert option_tables.PAGE.read_text() == option_tables.page(), "run: python scripts/option_tables.py"


def test_every_field_of_a_job_is_described():
    undescribed = {name for name, each in settings_of(TrainConfig).items() if "help" not in each.about}
    assert undescribed == {"training", "composition", "router"}  # sections; those of the others are names of options


def test_the_page_s_json_is_a_job():
    (text,) = re.findall(r"^```json\n(.*?)^```", option_tables.PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert TrainConfig.from_json(json.loads(text)).composition.schedule == "zero-bubble"
