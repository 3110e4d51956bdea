"""Shared by the workers of `bench_decoding.py`: the rows, the clock, and the line that they print.

A worker is `WORKER.py FOLDER ROWS`, with a model's folder and the names of rows, separated by commas. It executes the
steps of each row in turn and prints a JSON object: the least CPU seconds of a step, over all threads of a rank; for
`clock` the least wall seconds; for `memory` the largest resident size in bytes. `memory` comes first.
"""

import json
import sys
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

PROMPT, NEW = 8, 16  # tokens in the decoding rows
LONG, REPEATS = 512, 2
ROWS = ("memory", "batch 1", "batch 8", "prefill", "train", "adapters", "clock")
TRAIN = (2, 256)  # samples and positions of a step
RANK, ALPHA = 8, 16.0  # of the adapters on all matrices of all blocks


def tokens(rows, length, vocabulary):
    """The token ids, equal on all sides."""
    return np.random.default_rng(rows * length).integers(3, vocabulary, (rows, length))


def largest_resident_size():
    """Bytes of this program alone; getrusage would also count its parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure(steps, report=True):
    """Time the rows that `argv[2]` names; ``steps`` maps each row to a function that executes a step."""
    results = {}
    for row in sys.argv[2].split(","):
        step = steps[row]()
        if row == "memory":
            step()
            results[row] = largest_resident_size()
            continue
        clock = perf_counter if row == "clock" else process_time
        step()
        times = []
        for _ in range(REPEATS):
            begin = clock()
            step()
            times.append(clock() - begin)
        results[row] = min(times)
    if report:
        print(json.dumps(results), flush=True)
