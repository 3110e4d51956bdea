"""Loggers: what they are given, what they write, and that a failing one stops nothing."""

import csv
import json
import logging
import sys
from typing import get_type_hints

import numpy as np
import pytest

from spmd_engine.cli import main
from spmd_engine.errors import UsageError
from spmd_engine.training.loggers import CSVLogger, PrometheusLogger, TensorBoardLogger, logger_named
from support.command_line import QUIET, TEXT

pytestmark = pytest.mark.usefixtures("narrow")

JOB = ["train", "--model", "gpt-nano", *TEXT, "--length", "16", "--batch-size", "2", *QUIET]


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_logger", raising=False)

    def run(*options):
        code = 0
        try:
            main([*JOB, *map(str, options)])
        except SystemExit as leave:
            code = leave.code
        return code, capsys.readouterr().err

    run.folder = tmp_path / "runs" / "one"
    return run


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_loggers_have_the_numbers_of_each_step(train):
    import tensorboardX.proto.event_pb2 as event_pb2
    from tensorboardX.record_writer import RecordWriter  # noqa: F401  (the files are of this format)

    loggers = [option for name in ("csv", "prometheus", "tensorboard") for option in ("--logger", name)]
    assert train("--steps", "3", "--eval-every", "2", "--run", "runs/one", *loggers)[0] == 0
    steps = lines(train.folder / "metrics.jsonl")
    with open(train.folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    assert [float(row["loss"]) for row in rows] == [step["loss"] for step in steps]
    assert [row["validation_loss"] for row in rows] == [
        "",
        str(steps[1]["validation_loss"]),
        str(steps[2]["validation_loss"]),
    ]
    text = (train.folder / "metrics.prom").read_text().splitlines()
    assert 'spmd_engine_step{run="one"} 3' in text and f'spmd_engine_loss{{run="one"}} {steps[2]["loss"]}' in text
    (events,) = (train.folder / "tensorboard").iterdir()
    found = {}
    content = events.read_bytes()
    while content:  # records: a length of 8 bytes, 4 of its checksum, the data, 4 of theirs
        length = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        content = content[16 + length :]
    np.testing.assert_allclose([found["loss", n] for n in (1, 2, 3)], [step["loss"] for step in steps], rtol=1e-6)


def test_a_run_that_resumes_continues_the_rows(train):
    assert train("--steps", "4", "--stop-at", "2", "--run", "runs/one", "--logger", "csv")[0] == 0
    with open(train.folder / "metrics.csv", "a") as file:
        file.write("3,lost\n9,lost\n")
    assert train("--resume", "--run", "runs/one", "--logger", "csv")[0] == 0
    with open(train.folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [
        (step["step"], step["loss"]) for step in lines(train.folder / "metrics.jsonl")
    ]


def test_prometheus_can_read_any_name_of_a_run(tmp_path):
    """Its format knows three escapes; other characters are UTF-8."""
    folder = tmp_path / 'a"b\\c\nü\udcff'
    folder.mkdir()
    logger = PrometheusLogger(folder)
    logger.log_metrics({"loss": 0.5}, 3)
    logger.finalize("success")
    written = (folder / "metrics.prom").read_bytes()
    label = rb'{run="a\"b\\c\n' + "ü?".encode() + b'"}'
    assert written == b"spmd_engine_step%b 3\nspmd_engine_loss%b 0.5\n" % (label, label)
    PrometheusLogger(folder).finalize("success")  # a start without a step
    assert (folder / "metrics.prom").read_bytes() == written


OWN = """
class Own:
    name, version = "own", None
    def __init__(self, folder):
        self.file = open(folder / "own.txt", "a")
    def log_hyperparams(self, params):
        print("params", params["model"]["name"], file=self.file)
    def log_metrics(self, metrics, step=None):
        print("metrics", step, sorted(metrics)[:2], file=self.file)
    def save(self):
        print("save", file=self.file)
    def finalize(self, status):
        print("finalize", status, file=self.file, flush=True)

class Broken(Own):
    def log_metrics(self, metrics, step=None):
        raise ConnectionError("no route")

def absent():
    raise OSError("no server")
"""


def test_a_logger_of_one_s_own(train, tmp_path):
    (tmp_path / "own_logger.py").write_text(OWN)
    assert train("--steps", "2", "--run", "runs/one", "--logger", "own_logger.py:Own")[0] == 0
    assert (train.folder / "own.txt").read_text().splitlines() == [
        "params gpt-nano",
        "metrics 1 ['bytes_sent', 'grad_norm']",
        "save",
        "metrics 2 ['bytes_sent', 'grad_norm']",
        "finalize success",
    ]


@pytest.mark.parametrize(
    "name, words",
    [
        ("Broken", "Broken failed in log_metrics (ConnectionError: no route); the run continues without it"),
        ("absent", "a logger failed in start (OSError: no server); the run continues without it"),
    ],
)
def test_a_logger_that_fails_stops_nothing(train, tmp_path, caplog, name, words):
    (tmp_path / "own_logger.py").write_text(OWN)
    with caplog.at_level(logging.WARNING):
        assert train("--steps", "3", "--run", "runs/one", "--logger", f"own_logger.py:{name}")[0] == 0
    assert len(lines(train.folder / "metrics.jsonl")) == 3
    assert [record.message for record in caplog.records if "logger" in record.name] == [words]


@pytest.mark.parametrize(
    "name, words",
    [("tensorbord", "--logger tensorbord: did you mean 'tensorboard'?"), ("no.py:Own", "there is no file no.py")],
)
def test_a_wrong_name_is_one_line(train, name, words):
    code, error = train("--steps", "1", "--logger", name)
    assert code == 2 and words in error and error.count("\n") == 1


def test_tensorboard_without_its_package(monkeypatch):
    monkeypatch.setattr("spmd_engine.training.loggers.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs tensorboardX: pip install 'spmd_engine\[loggers\]'"):
        logger_named("tensorboard")


@pytest.mark.parametrize("kind", [CSVLogger, PrometheusLogger, TensorBoardLogger])
def test_loggers_have_the_six_methods(kind, tmp_path):
    made = kind(tmp_path)
    assert (made.name, made.version) == (tmp_path.name, None) and get_type_hints(kind.log_metrics)
    made.log_hyperparams({})
    made.save()
    made.finalize("failed")
