"""The programs in examples/ run and learn."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_harness.launch import mpiexec
from spmd_engine import run_threads
from spmd_engine.cli import main
from spmd_engine.training import load_corpus
from support.command_line import QUIET, TEXT
from support.script_module import script

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_of_one_s_own_learns(mpi_run, tmp_path, ranks):
    environment = {"OMP_NUM_THREADS": "1"}
    result = mpi_run(ranks, EXAMPLES / "own_engine.py", "100", cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert losses[-1] < losses[0] < 3.2 and losses[-1] < 2.7  # from 5.5
    assert (tmp_path / "runs" / "bigram" / "checkpoints" / "latest" / "manifest.json").exists()


def test_an_engine_of_one_s_own_learns_on_virtual_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = script("own_engine", "examples")
    monkeypatch.setattr(example, "load_corpus", lambda group, _, context: load_corpus(group, TEXT[1], context))
    losses = run_threads(lambda: example.main(steps=20, batch_size=16), 2)
    assert losses[0] == losses[1] < 4.5  # from 5.5
    assert (tmp_path / "runs" / "bigram" / "checkpoints" / "latest" / "manifest.json").exists()


def test_virtual_ranks(mpi_run, tmp_path):
    result = mpi_run(1, EXAMPLES / "virtual_ranks.py", cwd=tmp_path)
    assert len(result.stdout.splitlines()) == 4
    assert "'sum over data': [4.0, 4.0]" in result.stdout.splitlines()[3]


@pytest.mark.soak
def test_two_shards_classify_and_keep_nothing(mpi_run, tmp_path):
    result = mpi_run(2, EXAMPLES / "two_shards.py", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("100% right") == 3
    told = re.findall(r"rank (\d) held ([\d,]+) bytes of features; of this batch it keeps (-?[\d,]+)", result.stdout)
    assert sorted(rank for rank, _, _ in told) == ["0"] * 2 + ["1"] * 2
    assert all(int(held.replace(",", "")) == 100 * 15 * 15 * 2 * 4 for _, held, _ in told)
    assert all(int(kept.replace(",", "")) < 5_000 for _, _, kept in told)


def test_the_commands_of_a_docstring_use_a_layer_of_one_s_own(tmp_path, monkeypatch, capsys):
    """On virtual ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_layer", raising=False)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.syspath_prepend(tmp_path)
    commands = re.findall(r"^(?:python|mpiexec) .*", (EXAMPLES / "own_layer.py").read_text(), re.MULTILINE)
    printed, quick = (
        {},
        {"train": [*QUIET, "--batch-size", "4"], "verify": ["--steps", "1"], "plan": ["--seconds", "0.3"]},
    )
    for command in commands:
        words = shlex.split(command)
        ranks, arguments = words[2] if words[0] == "mpiexec" else 1, words[words.index("spmd_engine") + 1 :]
        arguments += quick.get(arguments[0], [])
        run_threads(lambda: main(arguments), int(ranks))  # noqa: B023 (it is called now)
        printed[arguments[0]] = capsys.readouterr().out
    assert len(printed) == 6 and "agrees to" in printed["verify"] and printed["generate"].startswith("import ")
    assert "block0/taps/w" in printed["show"] and "block0/taps" in printed["analyze"] and "plan: " in printed["plan"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(mpiexec() is None, reason="needs an MPI library and its mpiexec")
def test_a_job_that_changes_its_shape_five_times_has_the_losses_of_a_quiet_rank(tmp_path):
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": scripts, "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, EXAMPLES / "elastic.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "300 steps: the largest difference of a loss is" in done.stdout
    assert (tmp_path / "runs" / "elastic" / "report.html").is_file()


def test_the_tour_runs_and_shows_its_pictures():
    """The cells of the notebook in one namespace, as a kernel runs them: what the last line of each shows."""
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    assert notebook["nbformat"] == 4 and {"metadata", "nbformat_minor"} < notebook.keys()
    names, shown = {"__name__": "tour"}, []
    for cell in notebook["cells"]:
        assert cell.keys() >= {"cell_type", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            *statements, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(statements, []), "tour", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "tour", "eval"), names)
                shown += [value._repr_html_()] if hasattr(value, "_repr_html_") else []
            else:
                exec(compile(ast.Module([last], []), "tour", "exec"), names)
    words = [
        "mesh data=2,model=2",
        "b/data f/model",
        "all_reduce",
        "shape 16 x 48",
        "agrees to",
        "1f1b: 4 stages",
        "predicted",
    ]
    assert len(shown) == len(words)
    assert all(word in html for word, html in zip(words, shown, strict=True))
    assert names["losses"][-1] < names["losses"][0]
