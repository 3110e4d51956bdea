"""Times a change of shape of a running job: in memory, and by a checkpoint and a restart on the other mesh; and the
join of two ranks of another mpiexec.

    python benchmarks/bench_shape_change.py --model gpt-mini --batch-size 16 --length 256 --rounds 5

A round of each alternates. The pause is the time between the end of the last step in the old shape and the beginning
of the first step in the new one, on rank 0. Shown with it: a step in each shape, and how much longer than the second
one the first step in the new shape takes.

    python benchmarks/bench_shape_change.py --live --model gpt-mini --batch-size 16 --length 256 --rounds 8

moves the boundary between two pipeline stages to and fro, live, with quiet steps in between. A period lasts from the
beginning of a step to that of the next: the quiet ones before a migration, those during the copy, the one in which it
is planned, and the one at whose end the shape changes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count, pairwise
from pathlib import Path

from spmd_engine import TrainConfig, train
from spmd_engine.adaptive import ShapeRequest
from spmd_engine.adaptive.joining import JoinRequests
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.runtime.mpi_job import find_mpiexec
from spmd_engine.training import Trainer

OLD, NEW = {"mesh": {"data": 4}, "zero": 0}, {"mesh": {"data": 2, "model": 2}, "zero": 1}
STEPS = 3  #: in a shape
QUIET = 5  #: steps before a live migration
STAGES = {"stages": "0,6"}, {"stages": "0,8"}  #: between which the boundary moves, by a block of gpt-mini


def work(options: argparse.Namespace) -> None:
    """One job: train, and print on rank 0 when each step began and ended."""
    shape = {"restarted": NEW, "live": {"mesh": {"pipe": 2}, **STAGES[0]}}.get(options.work, OLD)
    job = TrainConfig.of(
        model=options.model, data=options.data, batch_size=options.batch_size, length=options.length,
        steps=100_000, eval_every=0, eval_samples=1, save_every=0, sample=0, check_replicas_every=0, **shape,
    )  # fmt: skip
    times, step = [], Trainer.step

    def timed(trainer: Trainer):
        began = time.time()
        report = step(trainer)
        times.append((began, time.time()))
        return report

    Trainer.step = timed  # type: ignore[method-assign]
    if options.work == "joined":  # within step STEPS, wait until the other ranks are connected
        is_ready = JoinRequests.is_ready

        def in_step(joining: JoinRequests, world: Communicator) -> bool:
            while len(times) == STEPS - 1 and not is_ready(joining, world):
                time.sleep(0.01)
            return len(times) == STEPS - 1

        JoinRequests.is_ready = in_step  # type: ignore[method-assign]
    request = ShapeRequest(NEW)
    stop_at = {"stopped": STEPS, "live": 3 * QUIET * options.rounds}.get(options.work, 2 * STEPS)
    propose = (lambda n: request if n == STEPS else None) if options.work == "changing" else lambda n: None
    if options.work == "live":
        calls = count(1)  # there is none during a migration
        propose = lambda n: request_after(next(calls))
    run = train(job, options.run, resume=options.work == "restarted", stop_at=stop_at, propose=propose, enforce=False)
    if run.engine.device_id == 0:
        Path(options.run, "times.json").write_text(json.dumps(times))


def request_after(quiet: int) -> ShapeRequest | None:
    """The request after so many quiet steps."""
    number, left = divmod(quiet, QUIET)
    return None if left else ShapeRequest(STAGES[number % 2], protocol="live")


def times_of(options: argparse.Namespace, what: str, run: Path, ranks: int = 4) -> list[tuple[float, float]]:
    shared = {name: getattr(options, name) for name in ("model", "data", "batch_size", "length")}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in shared.items()]
    mpiexec = find_mpiexec() or ("mpiexec",)
    joins = None
    if what == "joined":
        command = [*mpiexec, "-n", "2", sys.executable, "-m", "spmd_engine", "join", str(run), "--mesh", "data=6"]
        joins = subprocess.Popen(
            ["bash", "-c", 'until [ -e "$0/events.jsonl" ]; do sleep 0.1; done; exec "$@"', str(run), *command]
        )
    command = [
        *mpiexec,
        "-n",
        str(ranks),
        sys.executable,
        __file__,
        *arguments,
        f"--work={what}",
        f"--run={run}",
        f"--rounds={options.rounds}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if joins and joins.wait() != 0:
        raise SystemExit("the ranks that joined failed")
    return json.loads((run / "times.json").read_text())


def one_round(options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        changing = times_of(options, "changing", Path(folder, "changing"))
        stopped = times_of(options, "stopped", Path(folder, "restarted"))
        restarted = times_of(options, "restarted", Path(folder, "restarted"))
        joined = times_of(options, "joined", Path(folder, "joined"))
    seconds = [end - began for began, end in changing]
    return {
        "a step before": seconds[STEPS - 1],
        "a step after": seconds[-1],
        "the first step after, beyond the second": seconds[STEPS] - seconds[STEPS + 1],
        "pause of the change": changing[STEPS][0] - changing[STEPS - 1][1],
        "pause of a join of 2 ranks, onto data=6": joined[STEPS][0] - joined[STEPS - 1][1],
        "pause of save, restart and load": restarted[0][0] - stopped[-1][1],
    }


def live(options: argparse.Namespace) -> dict[str, list[float]]:
    """The periods of each kind, each divided by the median of the quiet ones before its migration."""
    with tempfile.TemporaryDirectory() as folder:
        began = [begin for begin, _ in times_of(options, "live", Path(folder), ranks=2)]
        lines = [json.loads(line) for line in Path(folder, "events.jsonl").read_text().splitlines()]
    periods = [0.0, *(later - earlier for earlier, later in pairwise(began))]  # by the number of the step
    planned = [line["step"] for line in lines if line["event"] == "migrating"]
    changed = [line["step"] for line in lines if line["event"] == "reshaped"]
    found: dict[str, list[float]] = {"quiet": [], "during the copy": [], "planned": [], "shape changed": []}
    for first, last in list(zip(planned, changed, strict=False))[1:]:  # the first ones fill caches
        quiet = periods[first - QUIET + 2 : first]
        usual = statistics.median(quiet)
        parts = quiet, periods[first + 1 : last], [periods[first]], [periods[last]]
        for kind, part in zip(found, parts, strict=True):
            found[kind] += [seconds / usual for seconds in part]
    print(f"  quiet {statistics.median(periods[QUIET : planned[1]]):.3f} s; {lines_of_plans(lines)}")
    return found


def lines_of_plans(lines: list[dict]) -> str:
    plan = next(line for line in lines if line["event"] == "migrating")
    return f"{plan['bytes'] / 1e6:.1f} MB move, {plan['bytes_of_gradients'] / 1e6:.1f} MB of gradients a step"


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a change of shape of a running job.")
    parser.add_argument("--model", default="gpt-mini")
    parser.add_argument("--data", default="docs")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--live", action="store_true", help="time steps during a live migration instead")
    works = ["changing", "stopped", "restarted", "live", "joined"]
    parser.add_argument("--work", choices=works, help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    if options.live:
        print(f"{options.model}, {options.batch_size} x {options.length}, 2 ranks, {os.cpu_count()} cores")
        for kind, ratios in live(options).items():
            low, middle, high = statistics.quantiles(ratios or [0], n=4) if len(ratios) > 1 else [*ratios, 0, 0, 0][:3]
            print(f"  {kind:16} {middle:6.3f} (quartiles {low:.3f}, {high:.3f}; {len(ratios)} periods) of a quiet one")
        return
    rounds = [one_round(options) for _ in range(options.rounds)]
    print(f"{options.model}, {options.batch_size} x {options.length}, 4 ranks, {os.cpu_count()} cores")
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        print(f"  {name:40} {statistics.median(values):7.3f} s ({min(values):.3f}-{max(values):.3f})")
    pause, restart = "pause of the change", "pause of save, restart and load"
    for other, text in (("a step before", "of a step before"), (restart, "of save, restart and load")):
        ratios = [each[pause] / each[other] for each in rounds]
        print(f"  the pause is {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) {text}")


if __name__ == "__main__":
    main()
