"""`new`: what it writes runs as it stands."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_engine.cli.new import TEMPLATES
from support.command_line import ONE_THREAD, metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(here, tmp_path):
    code, out, _ = here("new", "mine")
    assert code == 0 and out == f"wrote mine: {', '.join(TEMPLATES)}\n"
    return tmp_path / "mine"


def run(folder, *args, **environment):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": path, **environment}
    done = subprocess.run(args, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_its_test_passes(folder):
    here = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."]
    assert "7 passed" in run(folder, *command, **here)


def test_its_job_trains_and_continues(folder):
    here = {"MPIEXEC": "env", "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    run(folder, "sh", "job.sh", "--steps", "60", "--warmup", "0", "--learning-rate", "0.01", "--stop-at", "30", **here)
    run(folder, "sh", "job.sh", **here)
    steps = metrics(folder / "runs" / "mine")
    assert len(steps) == 60 and steps[-1]["loss"] < steps[0]["loss"] / 2
    assert (folder / "runs" / "mine" / "report.html").is_file()


def commands_of_readme(folder):
    block = (folder / "README.md").read_text().split("```")[1]
    commands = [line.partition("  #")[0].rstrip() for line in block.strip().splitlines()]
    others = {"python -m pytest", "sbatch job.sh"}  # see the tests above
    assert others < set(commands)
    return [command for command in commands if command not in others]


def test_the_commands_of_its_readme_run_on_virtual_ranks(folder, virtual, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    printed = ""
    for command in commands_of_readme(folder):
        words = command.split()
        if words[-1] == "model.py":
            runpy.run_path("model.py", run_name="__main__")
            continue
        launcher, arguments = words[: words.index("python")], words[words.index("spmd_engine") + 1 :]
        few = ["--steps", "2"] if arguments[0] == "train" else []
        printed += virtual(int(launcher[-1]) if launcher else 1, *arguments, *few).out
    assert "agrees to" in printed and "wrote runs/first/report.html" in printed
    assert len(metrics(folder / "runs" / "Regression-1")) == 2


@pytest.mark.soak
def test_its_readme_to_the_letter(folder):
    here = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    printed = [run(folder, "sh", "-c", command, **here) for command in commands_of_readme(folder)]
    assert "agrees to" in "".join(printed) and "wrote runs/first/report.html" in "".join(printed)
    losses = [float(line["validation_loss"]) for line in metrics(folder / "runs" / "Regression-1")[-1:]]
    assert losses[0] < 0.1


def test_nothing_is_written_over(folder, here):
    code, _, error = here("new", "mine")
    assert code == 2 and error == "spmd_engine: mine exists; give another name\n"
    code, _, error = here("new", "mine/model.py/x")
    assert code == 2 and "cannot be made: Not a directory" in error


def test_readme_names_its_folder(folder):
    texts = [(folder / name).read_text() for name in TEMPLATES]
    assert not any("{{" in text for text in texts) and texts[-1].startswith("# mine\n")
    assert all(len(line) <= 130 for text in texts for line in text.splitlines())
