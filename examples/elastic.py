"""A job changes its shape while it trains, and its losses stay those of one quiet rank: python examples/elastic.py

Four ranks train. One of them is slowed, and the job gives it fewer samples. Two more ranks join, and the mesh grows to
six. Layers move to another stage of the pipeline while steps go on. One rank leaves. Then one rank trains alone, from
the same start. The program fails if any loss differs by more than 1e-9; runs/elastic/report.html shows both runs.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

STEPS, PATIENCE, TOLERANCE = 300, 400, 1e-9  # PATIENCE: seconds in which each change must come
FOLDER = Path("runs/elastic")
CHANGING, ALONE = FOLDER / "changing", FOLDER / "alone"
JOB = f"--model gpt-nano --dtype float64 --batch-size 24 --length 32 --steps {STEPS} --data".split()
JOB += [Path(__file__).parents[1] / "docs"]
JOB += ["--eval-every", "0", "--save-every", "0", "--sample", "0"]
ADAPT = ["--adapt", "--adapt-every", "10", "--adapt-least-gain", "0.1"]  # without changes for a few per cent


def start(command, *options, ranks=1):
    """Start ranks that execute a command of spmd_engine."""
    options = [*command.split(), *map(str, options)]
    program = ["mpiexec", "-n", str(ranks), sys.executable, "-m", "spmd_engine", *options]
    return subprocess.Popen(program, env={**os.environ, "OMP_NUM_THREADS": "1"})  # a thread for each rank


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def wait_for(job, what, event, holds=lambda each: True):
    """Wait until ``what`` happens: a new event of this kind, for which ``holds`` is true, in the log of the job."""
    seen, end = wait_for.seen, time.monotonic() + PATIENCE
    while time.monotonic() < end and job.poll() is None:
        events = lines_of(CHANGING / "events.jsonl")
        for number, each in enumerate(events[seen:], seen):
            if each["event"] == event and holds(each):
                wait_for.seen = number + 1
                print(f"step {each.get('step', 0)}: {what}: {each.get('after', '')}", flush=True)
                return
        time.sleep(0.1)
    sys.exit(f"{what}: this did not come in {PATIENCE} s")


wait_for.seen = 0


@contextmanager
def slowed(process):
    """While open, a process is stopped for four fifths of the time."""
    ends = threading.Event()

    def stop_and_go():
        while not ends.is_set():
            os.kill(process, signal.SIGSTOP)
            ends.wait(0.04)
            os.kill(process, signal.SIGCONT)
            ends.wait(0.01)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def process_of(rank):
    end = time.monotonic() + PATIENCE
    while not (CHANGING / "activity.json").is_file() and time.monotonic() < end:
        time.sleep(0.1)
    return json.loads((CHANGING / "activity.json").read_text())["ranks"][rank]["process"]


def change(job, ranks_join=None):
    """Let the job go through all changes; return when it has ended."""
    wait_for(job, "four ranks train", "started")
    with slowed(process_of(3)):
        wait_for(job, "rank 3 is slow, and gets fewer samples", "reshaped", lambda each: "shares" in each["after"])
    joining = start("join", CHANGING, "--mesh", "pipe=2,data=3", ranks=2)
    wait_for(job, "two ranks have joined", "joined")
    wait_for(job, "the mesh has six ranks", "reshaped", lambda each: len(each["ranks"]) == 6)
    live = start("migrate", CHANGING, "--stages", "0,4", "--protocol", "live")
    wait_for(job, "layers begin to move to the second stage", "migrating")
    wait_for(job, "they are there, and the steps went on", "reshaped", lambda each: "stages 0,4" in each["after"])
    fewer = start("migrate", CHANGING, "--mesh", "data=5")
    wait_for(job, "one rank has left", "reshaped", lambda each: len(each["ranks"]) == 5)
    if any(each.wait() for each in (live, fewer, job, joining)):
        sys.exit("a program of the job has failed")


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    job = start("train", *JOB, "--run", CHANGING, "--mesh", "data=4", *ADAPT, ranks=4)
    try:
        change(job)
    finally:
        job.terminate()
    if start("train", *JOB, "--run", ALONE, ranks=1).wait():
        sys.exit("the quiet run has failed")
    losses = [[each["loss"] for each in lines_of(run / "metrics.jsonl")] for run in (CHANGING, ALONE)]
    largest = max(abs(a - b) for a, b in zip(*losses, strict=True))
    start("report", CHANGING, ALONE, "--output", FOLDER / "report.html").wait()
    print(f"{len(losses[0])} steps: the largest difference of a loss is {largest:.1e}")
    if len(losses[0]) != STEPS or largest > TOLERANCE:
        sys.exit(f"the losses differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
