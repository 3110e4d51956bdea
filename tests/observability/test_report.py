"""`report`: a page that holds what a run's folder holds, whatever that is."""

import json
import logging
import os
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_engine.engine.batch import Evaluation
from spmd_engine.observability.run_page import POINTS, _smoothed, page_of
from spmd_engine.observability.run_record import RunRecord
from spmd_engine.runtime.environment import environment
from spmd_engine.training.numbers_by_rank import condensed
from spmd_engine.training.observers import EventLog, Observer
from spmd_engine.training.run import Run
from spmd_engine.units import clock_time, readable_bytes
from support.command_line import QUIET, TEXT, metrics

pytestmark = pytest.mark.usefixtures("narrow")


class Page(HTMLParser):
    """The texts of a page by the tag that holds them, its sections, and the numbers of its curves."""

    VOID = {"meta", "br"}

    def __init__(self, path):
        super().__init__()
        self.open, self.texts, self.links = [], {}, []
        self.source = path.read_text() if hasattr(path, "read_text") else path
        self.feed(self.source)
        assert not self.open  # each element is closed
        self.charts = json.loads("".join(self.texts["script"][:1]))["charts"]
        self.curves = {chart["title"]: chart["curves"] for chart in self.charts}

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


@pytest.fixture
def trained(virtual, tmp_path):
    def run(name, *options, ranks=2):
        job = ["train", "--model", "gpt-nano", *TEXT, "--steps", "4", "--length", "16", "--batch-size", "4"]
        virtual(ranks, *job, *QUIET, "--eval-every", "2", "--run", f"runs/{name}", *options)
        return tmp_path / "runs" / name

    return run


def test_a_page_holds_the_run(trained, here, tmp_path):
    folder = trained("one", "--mesh", "pipe=2", "--micro-batches", "2", "--report")
    page, steps = Page(folder / "report.html"), metrics(folder)
    assert not page.links and len(page.source) < 200_000  # it needs nothing else
    for title, key in (
        ("Training loss", "loss"),
        ("Validation loss", "validation_loss"),
        ("Learning rate", "learning_rate"),
    ):
        (curve,) = page.curves[title]
        known = [(line["step"], line[key]) for line in steps if key in line]
        if key == "validation_loss":  # of the evaluation before the first step, which is an event
            (first,) = (e for e in map(json.loads, (folder / EventLog.NAME).open()) if e["event"] == "evaluated")
            known.insert(0, (0, first[key]))
        assert curve["x"] == [step for step, _ in known]
        np.testing.assert_allclose(curve["y"], [value for _, value in known], rtol=1e-5)
    predicted = steps[0]["predicted"]
    assert len(predicted["peak_bytes_by_rank"]) == len(predicted["resident_bytes_by_rank"]) == 2
    assert max(predicted["peak_bytes_by_rank"]) == predicted["peak_bytes"]
    assert sum(line["bytes"] for line in predicted["traffic"]) == predicted["bytes_sent"] == steps[0]["bytes_sent"]
    cells = page.texts["td"]
    assert f"{steps[0]['bytes_sent']:,}" in cells or len(predicted["traffic"]) > 1
    assert "All calls and bytes are as predicted." in page.texts["p"]
    record = RunRecord.read(folder)
    assert record.last("started")["time"][:10] in " ".join(cells) and clock_time(record.seconds) in cells
    assert {"Memory of each rank", "Communication of a step", "Mesh and sharding", "Events"} <= set(page.texts["h2"])
    drawings = "".join(page.texts["title"])
    assert "mesh pipe=2: 2 ranks" in drawings and "1f1b: 2 stages, 2 micro-batches" in drawings
    assert "block0/attention/query" in page.texts["th"] and "finished" in cells
    code, out, _ = here("report", "runs/one", "-o", "other.html")
    assert code == 0 and out == "wrote other.html\n" and Page(tmp_path / "other.html").curves == page.curves


def test_pages_of_several_runs_say_first_what_differs(trained, here, tmp_path):
    trained("one", "--mesh", "data=2")
    trained("two", "--mesh", "model=2", "--weight-decay", "0.2")
    log = tmp_path / "runs" / "two" / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        if event["event"] == "started":
            event["nodes"] = ["a", "b"]
            event["environment"]["SPMD_FAST"] = "0"
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert here("report", "one", "two", "--output", "both.html")[0] == 0
    page = Page(tmp_path / "both.html")
    assert page.texts["h2"][:3] == ["Summary", "What differs", "Curves"]
    assert page.texts["p"][0].startswith("A median step of two takes ") and "times one): " in page.texts["p"][0]
    assert "Environment" in page.texts["caption"] and {"SPMD_FAST", "nodes"} <= set(page.texts["th"])
    assert {"2 ranks on 1", "2 ranks on 2"} <= set(page.texts["td"])
    rows = page.texts["th"]
    first = rows.index("training.weight_decay")
    assert rows[first - 1 : first + 4].count("training.steps") == 0 and "composition.mesh.model" in rows
    assert page.texts["td"].count("0.2") >= 2  # among the differences, and among all options
    assert [curve["name"] for curve in page.curves["Training loss"]] == ["one", "two"]


def folder_of(path, steps, **config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model": {"name": "gpt-nano"}, **config}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return path


def run_of(path, seconds, shares, processor, cores):
    steps = [
        {"step": n, "loss": 1.0, "seconds": s, "shares": shares, "cpu_seconds": processor}
        for n, s in enumerate(seconds, 1)
    ]
    steps[0]["predicted"] = {"cores_by_rank": cores, "peak_bytes": 1 << 20}
    return RunRecord.read(folder_of(path, steps))


def test_why_a_run_is_slower_is_said(tmp_path):
    quick = run_of(tmp_path / "quick", [9, 9, 1.0, 1.0, 1.1, 1.1], [[0.9, 0.1, 0]] * 2, [0.9, 0.9], [[0], [1]])
    shares = [[0.45, 0.05, 0.5], [0.9, 0.1, 0]]
    slow = run_of(tmp_path / "slow", [9, 9, 2.0, 2.0, 2.1, 2.1], shares, [0.9, 0.9], [[1], [1]])
    page = Page(page_of([quick, slow]))
    change = page.texts["p"][0]
    assert change.startswith(
        "A median step of slow takes +1 s (1.95 times quick): +0.439 s computing, +0.0487 s commun"
    )
    assert "fastest step takes 2 times" in change and "noise" not in change
    cells = page.texts["td"]
    assert {"all alike", "rank 1: 2.00 times the median of the others", "rank 0: 0; rank 1: 1"} <= set(cells)
    assert "rank 0: 1; rank 1: 1 (several ranks on core 1)" in cells
    same = run_of(tmp_path / "same", [9, 9, 1.0, 1.02, 1.1, 1.2], [[0.9, 0.1, 0]] * 2, [0.9, 0.9], [[0], [1]])
    assert "the difference may be noise" in Page(page_of([quick, same])).texts["p"][0]


def test_long_runs_keep_their_extremes(tmp_path):
    draw = np.random.default_rng(0)
    loss = draw.standard_normal(20_000)
    loss[[777, 15_001]] = 50, -50
    folder = folder_of(tmp_path / "long", [{"step": n, "loss": y, "seconds": 0.1} for n, y in enumerate(loss, 1)])
    page = Page(page_of([RunRecord.read(folder)]))
    (curve,) = page.curves["Training loss"]
    assert len(curve["x"]) <= POINTS + 2 and curve["x"] == sorted(set(curve["x"]))
    found = dict(zip(curve["x"], curve["y"], strict=True))
    assert (found[778], found[15_002]) == (50, -50) and {1, 20_000} <= found.keys()
    assert (
        "Of 20,000 steps, the least and the largest value of each of 1,200 intervals are drawn." in page.texts["p"][0]
    )
    assert len(page.source) < 1_000_000


def test_nothing_in_a_run_becomes_a_part_of_the_page(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=y>"
    folder = folder_of(tmp_path / "evil", [{"step": 1, "loss": "nan", evil: 1.0, "seconds": 1}], model={"name": evil})
    events = {"event": "finished", "sample": evil}, {"event": "warning", "text": evil, "time": "x"}, {"event": evil}
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = Page(page_of([RunRecord.read(folder)]))
    assert "<img" not in page.source and page.texts["pre"] == [evil]
    assert evil.lower().capitalize() in page.curves


def test_damaged_lines_are_left_out(tmp_path):
    folder = folder_of(tmp_path / "cut", [{"step": 1, "loss": 2.0, "seconds": 1.0, "shares": [[1, 0, 0]]}])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('[1]\n{"loss": 3}\n{"step": 2, "loss": null, "shares": [[1], [2]]}\n\x00\n{"step": 3, "lo')
    run = RunRecord.read(folder)
    assert run.steps.tolist() == [1, 2] and run.final("loss") == 2 and run.state == "unknown"
    Page(page_of([run]))
    (folder / "metrics.jsonl").write_text("")
    Page(page_of([RunRecord.read(folder)]))  # of a run that has not made a step


def test_a_folder_that_is_no_run_is_one_line(here, tmp_path):
    code, _, error = here("report", str(tmp_path))
    assert code == 2 and error.startswith(f"spmd_engine: {tmp_path}: no run is there; name a folder that 'train' wrote")
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "metrics.jsonl").write_text("")
    code, _, error = here("report", str(tmp_path))
    assert code == 2 and "config.json cannot be read" in error and len(error.splitlines()) == 1
    code, _, error = here("report", str(tmp_path), "-o", "page.pdf")
    assert code == 2 and ".html" in error


def test_the_memory_of_many_ranks_is_that_of_those_that_stand_out(tmp_path):
    resident = [3 << 20] * 99 + [5 << 20]
    predicted = {"peak_bytes_by_rank": condensed([1 << 20] * 100), "resident_bytes_by_rank": condensed(resident)}
    run = RunRecord.read(folder_of(tmp_path / "many", [{"step": 1, "loss": 1.0, "predicted": predicted}]))
    cells = Page(page_of([run])).texts["td"]
    assert cells.count(readable_bytes(4 << 20)) == 1 and 1 < cells.count(readable_bytes(3 << 20)) < 12


@pytest.mark.parametrize(
    "predicted", [3, {"traffic": 3}, {"traffic": [{}]}, {"peak_bytes_by_rank": [1], "resident_bytes_by_rank": "x"}]
)
def test_damaged_numbers_are_no_traceback(here, tmp_path, predicted):
    folder = folder_of(tmp_path / "odd", [{"step": 1, "loss": 2.0, "shares": "x", "predicted": predicted}])
    code, _, error = here("report", str(folder))
    assert (code, error) == (0, "") or code == 2 and len(error.splitlines()) == 1


def test_a_run_that_goes_on_is_followed_to_its_end(here, tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "live", [{"step": 1, "loss": 2.0, "seconds": 1.0}])
    (folder / "events.jsonl").write_text('{"event": "started", "time": "2026-01-01T00:00:00"}\n')
    (folder / ".lock").write_text(f"process {os.getpid()} on {os.uname().nodename}, 0123\n")
    pages = []

    def wait(seconds):
        pages.append((folder / "report.html").read_text())
        with open(folder / "events.jsonl", "a") as file:
            file.write('{"event": "finished"}\n')
        (folder / ".lock").write_text("\n")

    monkeypatch.setattr("time.sleep", wait)
    assert here("report", str(folder), "--follow")[1].count("wrote") == 2
    assert 'http-equiv="refresh"' in pages[0] and 'http-equiv="refresh"' not in (folder / "report.html").read_text()
    assert RunRecord.read(folder).state == "finished"


def test_a_run_that_was_killed_is_not_followed(here, tmp_path):
    folder = folder_of(tmp_path / "dead", [{"step": 1, "loss": 2.0, "seconds": 1.0}])
    (folder / "events.jsonl").write_text('{"event": "started", "time": "2026-01-01T00:00:00"}\n')
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    (folder / ".lock").write_text(f"process {int(ended.stdout)} on {os.uname().nodename}, 0123\n")
    assert here("report", str(folder), "--follow")[1].count("wrote") == 1
    assert "killed" in Page(folder / "report.html").texts["td"]


class Failing(Observer):
    def stepped(self, report):
        logging.getLogger("spmd_engine.test").warning("careful")
        if report.step == 2:
            raise RuntimeError("broken")


def test_events_of_a_run(tmp_path, monkeypatch, capsys):
    from spmd_engine import Mesh, as_distributed, batch_of
    from spmd_engine.engine import SGD
    from spmd_engine.models import two_layers
    from spmd_engine.training import Trainer

    engine = as_distributed(two_layers(4, 6), Mesh(data=1))
    x = np.ones((2, 4), np.float32)
    trainer = Trainer(engine, SGD(), lambda step: batch_of(x, x, engine, step=step), rate=lambda step: 0.1)
    run = Run(tmp_path / "run", trainer, config={}, observers=[Failing()])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    with pytest.raises(RuntimeError):
        run.train(3)
    assert capsys.readouterr().err == "careful\ncareful\n"
    lines = [json.loads(line) for line in (tmp_path / "run" / EventLog.NAME).read_text().splitlines()]
    assert [line["event"] for line in lines] == ["started", "warning", "warning", "closed"]
    assert (
        lines[0]["environment"]["numpy"] == np.__version__
        and lines[0]["mesh"] == "data=1"
        and lines[1]["text"] == "careful"
    )
    (tmp_path / "run" / "config.json").write_text("{}")
    assert RunRecord.read(tmp_path / "run").state == "ended by an error"


def test_a_noisy_curve_gets_a_smoothed_line_and_a_smooth_one_does_not():
    x = np.arange(1, 401)
    noise = np.random.default_rng(0).standard_normal(400)
    kept, means = _smoothed(x, np.exp(-x / 100) + noise / 10)
    assert np.abs(means - np.exp(-kept / 100)).std() < 0.05
    assert _smoothed(x, np.exp(-x / 100)) is None and _smoothed(x[:30], noise[:30]) is None


def test_a_run_took_the_time_of_its_starts(tmp_path):
    times = {"started": "10:00:00", "closed": "10:00:30"}, {"started": "11:00:00", "saved": "11:01:00"}
    events = [{"event": kind, "time": f"2026-01-01T{time}+00:00"} for start in times for kind, time in start.items()]
    assert RunRecord("run", {}, *[np.empty(0)] * 4, {}, (), tuple(events), {}).seconds == 90


def test_the_command_of_a_run_can_be_run_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/lib/spmd_engine/__main__.py", "train", "--run", "a b"])
    assert environment()["command"] == "python -m spmd_engine train --run 'a b'"
    monkeypatch.setattr(sys, "argv", ["mine.py", "3"])
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "8")
    assert environment()["command"] == "mpiexec -n 8 python mine.py 3"


def test_the_accuracy_before_the_first_step_is_an_event_and_on_the_page(tmp_path):
    steps = [{"step": n, "loss": 1.0, "validation_loss": 0.9, "validation_accuracy": 0.5} for n in (1, 2)]
    folder, log = folder_of(tmp_path / "run", steps), EventLog(tmp_path / "run")
    log._run = SimpleNamespace(evaluation=Evaluation(2.0, {"accuracy": 0.125}, 8))
    log.evaluated(0, 2.0)
    (curve,) = Page(page_of([RunRecord.read(folder)])).curves["Validation accuracy"]
    assert curve["x"] == [0, 1, 2] and curve["y"] == [0.125, 0.5, 0.5]
