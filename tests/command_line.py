"""What the tests of the command line share: options that save time, and what a run has written."""

import json
from pathlib import Path

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # one rank alone would take every core and race the others' tests
QUIET = ["--eval-every", "0", "--eval-samples", "2", "--sample", "0"]
TEXT = ["--data", str(Path(__file__).parents[1] / "docs")]  # a hundredth of what is read by default


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
