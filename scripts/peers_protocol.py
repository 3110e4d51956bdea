"""What all workers of `bench_peers.py` share: the batches, the clock, the memory, and the result they print.

A worker is `WORKER.py CONFIG`, on every rank, where CONFIG is a JSON object:

    batch_size, seed, threads, learning_rate, clip_norm (0: none)
    warmup, steps, block      how many blocks of steps are not timed, how many are, and the steps of a block (1)
    vocabulary, context, layers, width, heads, betas, epsilon, weight_decay
                              of a GPT-2 with tied head, without dropout, with GPT-2's init and AdamW (decay on tables
                              and matrices only), on batches
                              numpy.random.default_rng(seed).integers(0, vocabulary, (steps, batch_size, context + 1)),
                              one a step, tokens [:, :-1] and targets [:, 1:]
    sizes                     instead of those: of a multilayer perceptron with relu, cross-entropy and plain SGD

All in float32, but for what a worker's own options say. Random tokens cannot be learned: losses stay near
ln(vocabulary).

Steps follow each other without a barrier. A step lasts from the moment when the one before has ended on *all* ranks
to the moment when this one has: when every rank has its loss as a Python float and its parameters are updated. So it
includes zeroing gradients, and ranks of one machine have one clock. Batches are cut beforehand.

Imported by workers of several Pythons: needs NumPy alone.
"""

import json
import resource
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

MLP_BATCHES = 16  # different ones; then they come again


def read_config():
    """The configuration, `argv[1]`; `block` may be left out."""
    return {"block": 1} | json.loads(sys.argv[1])


def make_batches(config):
    """Pairs of inputs and targets of the global batch: step i takes number i modulo how many there are."""
    random, rows = np.random.default_rng(config["seed"]), config["batch_size"]
    if "sizes" in config:
        inputs = random.standard_normal((MLP_BATCHES, rows, config["sizes"][0]), np.float32)
        return list(zip(inputs, random.integers(0, config["sizes"][-1], (MLP_BATCHES, rows)), strict=True))
    shape = (step_count(config), rows, config["context"] + 1)
    tokens = random.integers(0, config["vocabulary"], shape)
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def step_count(config):
    """How many steps are made, warm-up included."""
    return (config["warmup"] + config["steps"]) * config["block"]


def time_steps(config, step, barrier=lambda: None, clock=perf_counter):
    """Call `step(index)`, which returns the loss, for every step; return this rank's row for `print_result`."""
    barrier()
    marks, losses = [clock()], []
    for index in range(step_count(config)):
        losses.append(step(index))
        marks.append(clock())
    return np.array([losses[0], losses[-1], peak_memory(), *marks], np.float64)


def print_result(config, rows, version):
    """Print the result from the rows of all ranks, [ranks, n]: on one rank, when no rank has ended yet."""
    rows = np.asarray(rows)
    ends = rows[:, 3:].max(axis=0)[:: config["block"]]
    result = {
        "step_seconds": (np.diff(ends)[config["warmup"] :] / config["block"]).tolist(),
        "peak_rss_bytes": int(rows[:, 2].max()),
        "first_loss": rows[:, 0].mean(),  # ranks have equal parts of the batch, or all have its mean
        "last_loss": rows[:, 1].mean(),
        "version": version,
    }
    print(json.dumps(result), flush=True)


def peak_memory():
    """The most bytes that were resident in this process, memory it shares with other ranks counted by its part."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if not Path("/proc/self/smaps_rollup").exists():
        return peak
    shared, part = _kibibytes("/proc/self/status", "RssShmem:"), _kibibytes("/proc/self/smaps_rollup", "Pss_Shmem:")
    return peak - (shared - part) * 1024


def _kibibytes(path, field):
    for line in Path(path).read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0
