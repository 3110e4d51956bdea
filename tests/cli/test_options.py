"""Options are made from the fields of configurations, and none that there was is lost."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from spmd_engine.cli import cli
from spmd_engine.cli.options import (
    LongCommand,
    Quantity,
    chosen_settings,
    options_of,
    rare_option,
    takes_job,
    values_given,
)
from spmd_engine.configuration import settings_of
from spmd_engine.training import TrainConfig
from spmd_engine.units import BYTES, SECONDS

#: By command: all options of version 0.1. They must stay, or be old names of others.
OPTIONS = json.loads((Path(__file__).parents[1] / "golden" / "options.json").read_text())
OLD_NAMES = {
    name: each.about["old_names"] for name, each in settings_of(TrainConfig).items() if "old_names" in each.about
}


def command_named(words):
    command = cli
    for word in words.split():
        command = command.get_command(click.Context(command), word)
    return command


def run(command, *arguments):
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


@pytest.mark.parametrize("words", OPTIONS)
def test_no_option_is_lost(words):
    known = {
        name
        for each in command_named(words).params
        if isinstance(each, click.Option)
        for name in (*each.opts, *each.secondary_opts)
    }
    assert set(OPTIONS[words]) <= known


def test_old_names_are_accepted_and_not_listed():
    names = {"model": ("engine",), "length": ("sequence",), "precision": ("dtype",), "reshard_after": ("recut_after",)}
    assert names == OLD_NAMES

    @click.command()
    @takes_job("length", config=False)
    def show(job):
        click.echo(job.data.length)

    for flag in ("--length", "--sequence"):
        assert run(show, flag, "7").output == "7\n"
    text = run(show, "--help").output
    assert "--length INTEGER" in text and "--sequence" not in text


def test_help_is_that_of_the_field():
    @click.command()
    @options_of(TrainConfig, ["composition", "timeout"])
    def show(**options):
        pass

    text = " ".join(run(show, "--help").output.split())
    assert "--zero INTEGER ZeRO stage: 1 shards the optimizer state" in text
    assert "[default: 3 over an axis shard, else 0]" in text
    assert "--group-cap SIZE" in text and "[default: 32MiB]" in text
    assert "--timeout TIME" in text and "[default: 1800s]" in text
    assert "--schedule [naive|gpipe|1f1b" in text


def test_the_first_page_of_a_long_command_has_the_common_options_in_short():
    @click.command(cls=LongCommand)
    @click.argument("file", required=False)
    @rare_option("--trace", help="Record.")
    @click.option("--run", type=click.IntRange(0), help="A folder. Or a name. [default: new]")
    @options_of(TrainConfig, ["zero", "group_cap", "timeout"])
    def show(**options):
        pass

    first, every = (run(show, flag).output for flag in ("--help", "--help-all"))
    assert "A folder. [default: new]  [x>=0]\n" in first and "--zero" in first
    assert "file" not in first.lower().partition("options:")[2] and "of all 5 options" in first
    assert not any(option in first for option in ("--trace", "--group-cap", "--timeout", "Or a name"))
    order = "Options:", "Record.", "Or a name", "Composition options:", "--zero", "--group-cap", "Job options:"
    places = [every.index(text) for text in (*order, "--timeout")]
    assert places == sorted(places)


def test_the_first_page_of_train_is_a_page():
    text = run(command_named("train"), "--help").output
    assert text.count("\n") <= 64
    needed = ("data", "mesh", "batch-size", "learning-rate", "precision", "run", "resume", "save-every", "report")
    assert all(f"  --{name} " in text for name in needed)
    every = run(command_named("train"), "--help-all").output
    assert all(f"  --{name.replace('_', '-')}" in every for name in chosen_settings(TrainConfig) if name != "images")


def test_values_of_a_command_line_are_those_of_the_fields():
    @click.command()
    @options_of(TrainConfig)
    @click.pass_context
    def show(context, **options):
        given = values_given(context.params)
        click.echo(json.dumps(given))

    line = ["--timeout", "2min", "--group-cap", "1MiB", "--mesh", "data=2,pipe=3", "--no-check", "--lora-rank", "4"]
    expected = {"timeout": 120.0, "group_cap": 1 << 20, "mesh": {"data": 2, "pipe": 3}, "check": False, "lora_rank": 4}
    assert json.loads(run(show, *line).output) == expected
    assert run(show).output == "{}\n"


def test_names_choose_options_and_sections():
    assert set(chosen_settings(TrainConfig, ["model", "lora"])) == {"model", "lora_rank", "lora_alpha", "lora_targets"}
    assert "zero" not in chosen_settings(TrainConfig, ["composition"], without=["zero"])
    assert not {"version", "corpus", "shape", "training", "score"} & chosen_settings(TrainConfig).keys()


def test_options_override_a_file_and_the_file_overrides_a_command(tmp_path):
    TrainConfig.of(batch_size=4, seed=3).write(tmp_path / "job.json")

    @click.command()
    @takes_job("batch_size", "length", "seed", defaults={"batch_size": 2, "length": 32})
    def show(job):
        click.echo(f"{job.data.batch_size} {job.data.length} {job.model.seed}")

    assert run(show).output == "2 32 0\n"
    assert run(show, "--config", str(tmp_path / "job.json")).output == "4 32 3\n"
    assert run(show, "--config", str(tmp_path / "job.json"), "--seed", "5").output == "4 32 5\n"


@pytest.mark.parametrize(
    "unit, text, value",
    [
        (BYTES, "24GiB", 24 << 30),
        (BYTES, "1GB/s", 10**9),
        (BYTES, "1000", 1000),
        (SECONDS, "100ms", 0.1),
        (SECONDS, "2", 2.0),
        (SECONDS, "1h", 3600.0),
    ],
)
def test_quantities_take_units(unit, text, value):
    assert Quantity(unit).convert(text, None, None) == pytest.approx(value)
