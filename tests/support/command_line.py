"""Helpers for the tests of the command line: options that save time, the metrics of a run, and a full disk."""

import json
import resource
import signal
from pathlib import Path

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # a single rank would use every core and compete with other tests
QUIET = ["--eval-every", "0", "--eval-samples", "2", "--sample", "0"]
TEXT = ["--data", str(Path(__file__).parents[2] / "docs")]  # a hundredth of the default data


def metrics(folder):
    complete, _, _ = (folder / "metrics.jsonl").read_text().rpartition("\n")  # a run may be writing the next line
    return [*map(json.loads, complete.splitlines())]


def limited(size, do):
    """``do()``, while no file may be larger: as on a full disk, from the first byte on where that is 0."""
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        do()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
