"""The script for a machine with a GPU runs every part where there is none, and keeps what it has measured."""

import json
import subprocess
import sys

import pytest

from support.script_module import ROOT, script

PRECISIONS = "bfloat16", "float32", "tf32"


@pytest.fixture(scope="module")
def check():
    return script("gpu_check")


@pytest.fixture
def processes(check, tmp_path):
    return check.Processes(tmp_path / "log.txt", 1e6, sys.executable)


def test_bfloat16_comes_first_and_compilation_last(check, processes):
    names = [name for name, _ in check.parts(processes, dry_run=False)]
    assert names[2] == "gpt2, bfloat16"
    assert names[-3:] == [f"gpt2, {precision}, PyTorch compiled" for precision in PRECISIONS]
    assert names.index("tests of devices") < names.index("gpt2, float32") < names.index("gpt2, tf32")


def test_only_files_with_tests_of_devices_are_collected(check, tmp_path):
    for name, text in {
        "a/test_marked.py": "@pytest.mark.gpu\ndef test(): pass",
        "b/test_fixtures.py": "from test_marked import device",
        "b/test_neither.py": "gpu = 'a100'",
        "b/marked.py": "@pytest.mark.gpu",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [path.name for path in check.tests_of_devices(tmp_path)] == ["test_marked.py", "test_fixtures.py"]
    here = {path.name for path in check.tests_of_devices(ROOT / "tests")}
    assert {"test_cuda_kernels.py", "test_cuda_images.py"} <= here and len(here) < 6


def test_a_second_call_runs_only_what_is_missing_or_has_failed(check, tmp_path):
    table, calls = tmp_path / "table.json", []

    def part(name, facts):
        def run(rows):
            calls.append(name)
            if facts is None:
                raise KeyboardInterrupt
            return facts

        return name, run

    with pytest.raises(KeyboardInterrupt):
        check.fill(table, False, [part("a", {"n": 1}), part("b", {"failed": "x"}), part("c", None)])
    assert json.loads(table.read_text())["rows"] == {"a": {"n": 1}, "b": {"failed": "x"}}, "each row as it comes"
    assert check.fill(table, False, [part("a", {"n": 2}), part("b", {"n": 3}), part("c", {"left out": "y"})]) == {
        "a": {"n": 1},
        "b": {"n": 3},
        "c": {"left out": "y"},
    }
    assert calls == ["a", "b", "c", "b", "c"]
    assert check.fill(table, True, [part("a", {"n": 4})]) == {"a": {"n": 4}}, "a dry run is another table"


def test_a_process_that_takes_too_long_ends_and_one_without_time_left_does_not_start(check, processes, tmp_path):
    facts = processes.run(["sh", "-c", "sleep 60"], seconds=0.1)
    assert facts["failed"].startswith("no end after 0 seconds")
    late = check.Processes(tmp_path / "log.txt", 0, sys.executable)
    assert late.run(["false"]) == {"left out": "the other parts took 0 seconds"}
    assert "--- sh -c sleep 60" in (tmp_path / "log.txt").read_text()


def test_without_mpiexec_verify_runs_on_threads(check, processes, monkeypatch):
    processes.variables["PATH"] = ""
    monkeypatch.setattr(processes, "part", lambda name, config: {"part": name, **config})
    facts = processes.verify("data=2", "cuda")
    assert (facts["part"], facts["ranks"], facts["arguments"][3]) == ("verify", "threads", "data=2")
    verify = ["--strategy", "column-parallel", "--mesh", "model=2", "--steps", "1"]
    assert check.PARTS["verify"]({"arguments": verify}) == {"result": "agrees"}


@pytest.mark.soak
def test_every_part_of_the_dry_run(tmp_path):
    command = [ROOT / "scripts" / "gpu_check.sh", "--dry-run", "--folder", tmp_path]
    done = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}, capture_output=True, text=True
    )
    table = json.loads((tmp_path / "table.json").read_text())
    assert done.returncode == 0 and "DRY RUN" in done.stdout, done.stdout + done.stderr
    rows = table["rows"]
    assert table["dry_run"] and not [name for name, facts in rows.items() if "failed" in facts]
    for precision in PRECISIONS:
        assert rows[f"gpt2, {precision}"]["tokens/s"] > 0
        assert rows[f"gpt2, {precision}, predicted"]["launches"] > 100
        assert rows[f"gpt2, {precision}, PyTorch eager"].keys() & {"tokens/s", "left out"}
    assert rows["decoding, Llama 135M"]["batch 8, tokens/s"] > 0
