"""What the workers of `bench_decoding.py` share: what is measured, the clock, and the line that they print.

A worker is `WORKER.py FOLDER ROWS`, with a model's folder and the names of rows, with commas. It makes the steps of
each row in turn and prints a JSON object: the fewest seconds of processor time that a step took, all threads of a rank
together, and for `clock` those of the clock; for `memory` the largest resident size in bytes. `memory` comes first.
"""

import json
import sys
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

PROMPT, NEW = 8, 16  # tokens of the rows that decode
LONG, REPEATS = 512, 2
ROWS = ("memory", "batch 1", "batch 8", "prefill", "train", "adapters", "clock")
TRAIN = (2, 256)  # samples and positions of a step
RANK, ALPHA = 8, 16.0  # of adapters, of all matrices of all blocks


def tokens(rows, length, vocabulary):
    """The same for all sides."""
    return np.random.default_rng(rows * length).integers(3, vocabulary, (rows, length))


def largest_resident_size():
    """Bytes; of this program alone, where getrusage counts what started it as well."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure(steps, report=True):
    """Time the steps of the rows that `argv[2]` names; ``steps`` are what makes a step of each row."""
    found = {}
    for row in sys.argv[2].split(","):
        step = steps[row]()
        if row == "memory":
            step()
            found[row] = largest_resident_size()
            continue
        clock = perf_counter if row == "clock" else process_time
        step()
        times = []
        for _ in range(REPEATS):
            begin = clock()
            step()
            times.append(clock() - begin)
        found[row] = min(times)
    if report:
        print(json.dumps(found), flush=True)
