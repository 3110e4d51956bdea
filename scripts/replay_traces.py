"""Replays the policy of ``train --adapt`` on traces of ranks' speeds: ``python scripts/replay_traces.py``.

Four ranks, of which some become slower for a time: ramps, steps, oscillation, and adversaries that know the run's
present shape. Candidates give less work to one or two ranks. With ``--spot``, ranks that come and go by a CSV file with
the columns trace, time_s (seconds) and alive (ranks after that time); there a candidate is a number of ranks that share
256 samples. With ``--log``, decides again by the log of a run, and compares the decisions.

The table has steps as a part of those of the offline optimum and of a run without changes, then of runs that restart
from a checkpoint instead, which takes 30, 60 or 120 s; these decide without the account, which would forbid most.
"""

from __future__ import annotations

import csv
import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
from policy_traces import SimulatedShapes, replay_trace, steps_of_optimum

from spmd_engine.adaptive.adapter import replay
from spmd_engine.adaptive.policy import Policy
from spmd_engine.training.train_config import AdaptConfig

RANKS, SECONDS, SAMPLES = 4, 1800, 256
RESTARTS = (30, 60, 120)  #: seconds
GOALS = {"spot": 0.9, "ramp": 0.9, "steps": 0.9}  #: of the optimum; the others: 0.97 of no changes
SLOW = (0.5, 1 / 3)
Speeds = Callable[[int, int], np.ndarray]


def shapes_of_four() -> SimulatedShapes:
    """Even work of 0.5 s a rank, or less work for one rank or two."""
    weights = {"even": np.ones(RANKS)}
    for rank in range(RANKS):
        for less in (3 / 4, 1 / 2, 1 / 3, 0.0):
            weights[f"rank {rank} x {less:.2g}"] = np.where(np.arange(RANKS) == rank, less, 1.0)
    for pair in combinations(range(RANKS), 2):
        weights[f"ranks {pair} x 0.5"] = np.where(np.isin(np.arange(RANKS), pair), 0.5, 1.0)
    work = np.array([each / each.sum() for each in weights.values()])
    return SimulatedShapes(tuple(weights), 0.5 * RANKS * work, overhead=0.05)


def ramps() -> np.ndarray:
    """One rank becomes slower for ten minutes, to half its speed, stays so, and becomes quicker: float64[s, r]."""
    speeds = np.ones((SECONDS, RANKS))
    speeds[300:1500, 1] = np.concatenate([np.linspace(1, 0.5, 600), np.full(300, 0.5), np.linspace(0.5, 1, 300)])
    return speeds


def steps(seed: int) -> np.ndarray:
    """A rank takes another speed every 200 seconds on average: float64[s, r]."""
    random, speeds, second = np.random.default_rng(seed), np.ones((SECONDS, RANKS)), 0
    while (second := second + 1 + int(random.exponential(200))) < SECONDS:
        speeds[second:, random.integers(RANKS)] = random.choice([1, 0.75, *SLOW])
    return speeds


def oscillation(period: int) -> np.ndarray:
    """One rank has half its speed in the second half of each period: float64[s, r]."""
    speeds = np.ones((SECONDS, RANKS))
    speeds[np.arange(SECONDS) % period >= period / 2, 0] = 0.5
    return speeds


def adversary(shapes: SimulatedShapes, seed: int, chases: bool) -> Speeds:
    """Slows a rank with most work whenever the run has changed, and after random times.

    Unless it ``chases`` the run, it does so only while the work is even, so that a change is made for nothing.
    """
    random, slow, until, before = np.random.default_rng(seed), np.ones(RANKS), 0, -1

    def speeds(second: int, shape: int) -> np.ndarray:
        nonlocal slow, until, before
        if shape != before or second >= until:
            before, until, slow = shape, second + int(random.integers(10, 90)), np.ones(RANKS)
            if chases or shape == 0:
                most = np.flatnonzero(shapes.work[shape] > shapes.work[shape].max() - 1e-9)
                slow[random.choice(most)] = random.choice(SLOW)
        return slow

    return speeds


def drifts(shapes: SimulatedShapes) -> Iterator[tuple[str, Speeds]]:
    """The traces of four ranks, by name."""
    fixed = {"ramp": ramps()} | {f"steps, seed {seed}": steps(seed) for seed in range(3)}
    fixed |= {f"oscillation, {period} s": oscillation(period) for period in (20, 80, 160, 320)}
    for name, speeds in fixed.items():
        yield name, lambda second, shape, speeds=speeds: speeds[second]
    for chases in (False, True):
        for seed in range(2):
            kind = "chases the run" if chases else "undoes a change"
            yield f"adversary {kind}, seed {seed}", adversary(shapes, seed, chases)


def spot_traces(path: Path) -> Iterator[tuple[str, SimulatedShapes, np.ndarray]]:
    """The traces of a CSV file, from the first rank on: name, shapes, and speeds 0 or 1, float64[s, r]."""
    rows = list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))
    for name in dict.fromkeys(row["trace"] for row in rows):
        events = [(int(row["time_s"]), int(row["alive"])) for row in rows if row["trace"] == name]
        begin, most = events[0][0], max(alive for _, alive in events)
        alive = np.zeros(events[-1][0] - begin, int)
        for second, ranks in events:
            alive[second - begin :] = ranks
        counts = np.arange(1, most + 1)
        work = np.where(np.arange(most) < counts[:, None], -(-SAMPLES // counts[:, None]) / 8, 0.0)
        shapes = SimulatedShapes(tuple(f"data={ranks}" for ranks in counts), work, overhead=0.05)
        yield f"spot, {name}", shapes, (np.arange(most) < alive[:, None]).astype(float)


def row(
    name: str,
    shapes: SimulatedShapes,
    speeds: Speeds,
    seconds: int,
    first: int,
    policy: Policy,
    cost: int,
    noise: float,
) -> str:
    """The line of the table for a trace."""
    run = replay_trace(shapes, speeds, seconds, policy, first=first, cost=cost, noise=noise)
    rates = np.array([1 / shapes.step_seconds(each) for each in run.speeds])
    optimum, unchanged = steps_of_optimum(rates, first, cost), rates[:, first].sum()
    bold = Policy(policy.config.changed(most_loss=0.999))
    restarted = [
        replay_trace(
            shapes, lambda second, shape: run.speeds[second], seconds, bold, first=first, cost=restart, noise=noise
        ).steps
        for restart in RESTARTS
    ]
    goal = GOALS.get(name.split(",")[0])
    met = run.steps >= (goal * optimum if goal else 0.97 * unchanged)
    figures = [f"{n / optimum:.3f}" for n in (run.steps, *restarted)]
    missed = "" if met else " (missed)"
    return (
        f"| {name}{missed} | {figures[0]} | {run.steps / unchanged:.3f} | {run.changes} | {' | '.join(figures[1:])} |"
    )


def check_log(path: Path) -> int:
    """Print the decisions of a log, and those that the policy now makes otherwise; returns their number."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    others = 0
    for line, decision in zip(lines[1:], replay(lines), strict=True):
        print(line["line"])
        if decision.line != line["line"]:
            others += 1
            print(f"  now: {decision.line}")
    return others


def main() -> int:
    """Print the table; returns the number of goals that are missed."""
    parser = ArgumentParser(description="Replay the policy of train --adapt on traces.")
    parser.add_argument("--spot", type=Path, metavar="FILE", help="CSV file of ranks that come and go")
    parser.add_argument("--log", type=Path, metavar="FILE", help="the log of a run: decide again by it instead")
    parser.add_argument("--cost", type=int, default=1, help="whole seconds of a change (1)")
    parser.add_argument("--noise", type=float, default=0.02, help="relative error of measured seconds (0.02)")
    arguments = parser.parse_args()
    if arguments.log:
        return check_log(arguments.log)
    policy, four, rows = Policy(AdaptConfig()), shapes_of_four(), []
    print("| trace | of the optimum | of no changes | changes | restarts of 30 s | of 60 s | of 120 s |")
    print("|---|---|---|---|---|---|---|")
    traces = [(name, four, speeds, SECONDS, 0) for name, speeds in drifts(four)]
    for name, shapes, speeds in spot_traces(arguments.spot) if arguments.spot else ():
        first = int(speeds[0].sum()) - 1
        traces.append((name, shapes, lambda second, shape, speeds=speeds: speeds[second], len(speeds), first))
    for trace in traces:
        rows.append(row(*trace, policy, arguments.cost, arguments.noise))
        print(rows[-1], flush=True)
    return sum("(missed)" in each for each in rows)


if __name__ == "__main__":
    sys.exit(main())
