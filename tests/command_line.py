"""Helpers for the tests of the command line: options that save time, and the metrics of a run."""

import json
from pathlib import Path

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # a single rank would use every core and compete with other tests
QUIET = ["--eval-every", "0", "--eval-samples", "2", "--sample", "0"]
TEXT = ["--data", str(Path(__file__).parents[1] / "docs")]  # a hundredth of the default data


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
