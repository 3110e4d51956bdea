"""`new`: what it writes runs as it stands."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from command_line import ONE_THREAD, metrics
from spmd_engine.cli.new import TEMPLATES

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
    assert "7 passed" in run(folder, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".")


def test_its_job_trains_and_continues(folder):
    here = {"MPIEXEC": "env", "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    run(folder, "sh", "job.sh", "--steps", "60", "--warmup", "0", "--learning-rate", "0.01", "--stop-at", "30", **here)
    run(folder, "sh", "job.sh", **here)
    steps = metrics(folder / "runs" / "mine")
    assert len(steps) == 60 and steps[-1]["loss"] < steps[0]["loss"] / 2
    assert (folder / "runs" / "mine" / "report.html").is_file()


def test_its_engine_trains(folder, virtual):
    x = np.random.default_rng(0).standard_normal((64, 16))
    np.savez(folder / "numbers.npz", x=x, y=x[:, :4])
    model = ["--model", f"{folder}/model.py:Regression", "--data", str(folder / "numbers.npz"), "--warmup", "0"]
    virtual(2, "train", *model, "--mesh", "data=1,model=2", "--steps", "3", "--run", str(folder / "runs" / "r"))
    assert len(metrics(folder / "runs" / "r")) == 3


def test_nothing_is_written_over(folder, here):
    code, _, error = here("new", "mine")
    assert code == 2 and error == "spmd_engine: mine exists; give another name\n"
    code, _, error = here("new", "mine/model.py/x")
    assert code == 2 and "cannot be made: Not a directory" in error


def test_readme_names_its_folder(folder):
    texts = [(folder / name).read_text() for name in TEMPLATES]
    assert not any("{{" in text for text in texts) and texts[-1].startswith("# mine\n")
    assert all(len(line) <= 130 for text in texts for line in text.splitlines())
