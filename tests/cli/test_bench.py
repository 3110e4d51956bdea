"""The benchmarks run and say what they measured; what they measured is not tested."""

import json

import pytest

from spmd_engine.cli import main
from support.script_module import script

SHORT = ["--rounds", "1"]
NANO = ["--model", "gpt-nano", "--batch-size", "2"]


@pytest.fixture
def bench(capsys, tmp_path):
    """The table's lines, and what is in the file, if there is one."""

    def run(name, *options, file=True, command=None):
        path = tmp_path / "figures.json"
        arguments = [*SHORT, *(["--output", str(path)] if file else []), *options]
        if command is None:
            main(["bench", name, *arguments])
        else:
            command.main([*filter(None, [name]), *arguments], standalone_mode=False)
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        return [line for line in lines if line], json.loads(path.read_text()) if file else None

    return run


def test_train(bench):
    lines, figures = bench("train", "--ranks", "1", "--steps", "1", *NANO)
    assert lines[1].startswith("targets a second") and len(lines) == 11
    (result,) = figures["results"]
    assert result["tokens"] == 2 * 128 and result["bytes_sent"] == 0 and result["memory"] > 4 * 4 * 931_872


def test_layers(bench):
    lines, figures = bench("layers", "--steps", "1", *NANO)
    names = [line.split()[0] for line in lines[1:]]
    assert names == [
        "embedding",
        "positions",
        "block*/attention",
        "block*/mlp",
        "norm",
        "head",
        "loss,",
        "a",
        "products:",
    ]
    assert all(min(part) >= 0 for rounds in figures["seconds"].values() for part in rounds)
    assert figures["multiplications"]["block*/mlp"] == 6 * 2 * 128 * 8 * 2 * 96 * 4 * 96


@pytest.mark.parametrize("only", [["all_reduce", "all_to_all"], pytest.param([], marks=pytest.mark.soak)], ids=str)
@pytest.mark.parametrize("ranks", ["2", "3"])
@pytest.mark.soak
def test_collectives(bench, ranks, only):
    operations = only or ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
    words = [word for name in only for word in ("--only", name)]
    lines, figures = bench("collectives", "--ranks", ranks, "--largest", "1", *words)
    assert [line.split()[0] for line in lines[1:]] == [name for name in operations for _ in range(7)]
    assert {each["size"] for each in figures["results"]} == {8, *(4**power for power in range(5, 11))}
    assert all(values[0] > 0 for each in figures["results"] for values in each["seconds"].values())


@pytest.mark.soak
def test_strategies(bench):
    lines, figures = bench(
        "strategies",
        "--ranks",
        "2",
        "--steps",
        "1",
        "--only",
        "ZeRO-3",
        command=script("bench_strategies", "benchmarks").bench,
    )
    assert [line.split()[0] for line in lines[1:]] == ["data", "ZeRO-3"]
    data, zero = (figures[name][0]["bytes_sent"] for name in ("data", "ZeRO-3"))
    assert 1.5 * data < zero < 1.7 * data  # two gathers and a reduce_scatter, and the tied table once more


@pytest.mark.soak
def test_oversubscribed(bench):
    command = script("bench_strategies", "benchmarks").bench
    lines, figures = bench("oversubscribed", "--ranks", "3", "--steps", "1", "--model", "gpt-nano", command=command)
    assert "3" in figures and lines[-1].startswith("ratio")


@pytest.mark.soak
def test_start(bench):
    lines, figures = bench("", "--ranks", "2", command=script("bench_start", "benchmarks").start)
    assert lines[0].startswith("2 ranks") and "imports alone" in lines[1]
    parts = ["Python", "NumPy and MPI", "this package", "ranks meet", "model and data", "first step", "save"]
    assert list(figures["cpu_seconds"]["NumPy"]) == parts
    assert all(min(each) > 0 for each in figures["cpu_seconds"]["NumPy"].values())


def test_a_worker_that_fails_is_a_line(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "train", "--ranks", "2", *SHORT, "--mesh", "data=3"])
    assert caught.value.code == 2
    assert "mesh data=3 needs 3 ranks" in capsys.readouterr().err
