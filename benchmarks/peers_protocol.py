"""Shared by all workers of `bench_peers.py`: the batches, the clock, the memory, and the printed result.

A worker is `WORKER.py CONFIG`, on every rank, where CONFIG is a JSON object:

    batch_size, seed, threads, learning_rate, clip_norm (0: none)
    warmup, steps, block      untimed blocks of steps, timed blocks, and steps per block (1)
    vocabulary, context, layers, width, heads, betas, epsilon, weight_decay
                              of a GPT-2 with tied head, without dropout, with GPT-2's init and AdamW (decay on tables
                              and matrices only), on batches
                              numpy.random.default_rng(seed).integers(0, vocabulary, (steps, batch_size, context + 1)),
                              one per step, tokens [:, :-1] and targets [:, 1:]
    sizes                     instead of these: the widths of an MLP with relu, cross-entropy and plain SGD

    precision, products       as in `train`; PyTorch's workers take autocast for bfloat16

All is float32, unless `precision` or a worker's options change it. Random tokens cannot be learned: losses stay near
ln(vocabulary).

There is no barrier between steps. A step lasts from the end of the previous one on *all* ranks to its own end on all
ranks, when every rank has its loss as a Python float and its updated parameters. So it includes zeroing gradients.
Ranks of one machine share a clock. Batches are sharded beforehand.

Workers of several Pythons import this file, so it needs only NumPy.
"""

import json
import resource
import sys
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

MLP_BATCHES = 16  # different batches, which are repeated


def read_config():
    """The configuration, `argv[1]`; `block` is optional."""
    return {"block": 1} | json.loads(sys.argv[1])


def make_batches(config):
    """Pairs of inputs and targets of the global batch; step i uses number i modulo their count."""
    random, rows = np.random.default_rng(config["seed"]), config["batch_size"]
    if "sizes" in config:
        inputs = random.standard_normal((MLP_BATCHES, rows, config["sizes"][0]), np.float32)
        return list(zip(inputs, random.integers(0, config["sizes"][-1], (MLP_BATCHES, rows)), strict=True))
    shape = (step_count(config), rows, config["context"] + 1)
    tokens = random.integers(0, config["vocabulary"], shape)
    return [(sequences[:, :-1], sequences[:, 1:]) for sequences in tokens]


def step_count(config):
    """The number of steps, including warm-up."""
    return (config["warmup"] + config["steps"]) * config["block"]


def time_steps(config, step, barrier=lambda: None, clock=perf_counter, memory=None):
    """Call `step(index)`, which returns the loss, for every step; returns this rank's row for `print_result`.

    With `processor_time` in the configuration, steps of one rank are timed by its processor time."""
    if config.get("processor_time") and config["ranks"] == 1:
        clock = process_time
    barrier()
    marks, losses = [clock()], []
    for index in range(step_count(config)):
        losses.append(step(index))
        marks.append(clock())
    return np.array([losses[0], losses[-1], (memory or peak_memory)(), *marks], np.float64)


def print_result(config, rows, version):
    """Print the result from the rows of all ranks, [ranks, n]; called on one rank before any rank has ended."""
    rows = np.asarray(rows)
    ends = rows[:, 3:].max(axis=0)[:: config["block"]]
    result = {
        "step_seconds": (np.diff(ends)[config["warmup"] :] / config["block"]).tolist(),
        "peak_rss_bytes": int(rows[:, 2].max()),
        "first_loss": rows[:, 0].mean(),  # ranks have equal shards of the batch, or all have its mean
        "last_loss": rows[:, 1].mean(),
        "version": version,
    }
    print(json.dumps(result), flush=True)


def peak_memory():
    """The peak resident bytes of this process; memory shared with other ranks counts in part."""
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
