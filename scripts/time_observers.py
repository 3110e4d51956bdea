"""The time that observers' methods take of a step of ``train``: counted on rank 0, a median over the steps.

    mpiexec -n 8 python scripts/time_observers.py [--bar] [options of train]

With ``--bar``, the bar of a terminal is drawn, into standard error.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter, thread_time

import numpy as np

from spmd_engine.cli import main, progress
from spmd_engine.training.observers import Observer
from spmd_engine.training.run import Run
from spmd_engine.training.trainer import StepReport

WARM_UP = 3  #: first steps that are left out


def time_observers(options: list[str]) -> None:
    """Train, and print the times of rank 0."""
    seconds: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(3))  # by step: methods, their processor, step
    notify, stepped = Run._notify, progress.Reporter.stepped

    def timed(self: Run, event: Callable[[Observer], None]) -> None:
        began = perf_counter(), thread_time()
        notify(self, event)
        seconds[self.steps_done][:2] += perf_counter() - began[0], thread_time() - began[1]

    def noted(self: progress.Reporter, report: StepReport) -> None:
        seconds[report.step][2] = report.seconds
        stepped(self, report)

    Run._notify, progress.Reporter.stepped = timed, noted
    main(["train", *options])
    steps = np.array([seconds[step] for step in sorted(seconds) if step >= WARM_UP])
    if steps[:, 2:].any():  # not on other ranks, which have no observers
        methods, processor, whole = np.median(steps, axis=0)
        print(f"methods {1e6 * methods:.0f} us, processor {1e6 * processor:.0f} us, step {1e3 * whole:.1f} ms")
        print(f"share {methods / whole:.3%}, of the processor {processor / whole:.3%}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--bar" in arguments:
        arguments.remove("--bar")
        progress.terminal = lambda: "/proc/self/fd/2"
    time_observers(arguments)
