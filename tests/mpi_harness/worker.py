"""A process that runs tests for a parent: it reports their events, and ends if one of them hangs."""

import faulthandler
import gc
import json
import math
import os
import time

START_S = 180  # from the launch to the first test
GARBAGE = 10_000  # allocations minus deallocations that start a collection of the youngest generation; 700 by default
QUICK_S = 0.05  # setups and teardowns that pass sooner have no reports, which cost a tenth of a small test each
LATE_S = 1  # tolerance of a limit, since setting it starts a thread, three times per small test


class Worker:
    """Pytest plugin. The parent reads `folder` (parent.py); None: there is no parent."""

    def __init__(self, config, rank, folder):
        self.config, self.rank, self.folder = config, rank, folder
        # A copy of stderr, because pytest captures the original. Under a parent, every process has its own file.
        self.stderr = open(folder / f"stderr{rank}", "w") if folder else os.fdopen(os.dup(2), "w")
        self.events = open(folder / "events.jsonl", "a", buffering=1) if folder and rank == 0 else None
        self.outcomes = open(folder / f"rank{rank}.jsonl", "a", buffering=1) if folder else None
        self.limit_s, self.limited_at = None, -math.inf
        self._limit(START_S)

    def _limit(self, seconds):
        """Unless this is called again in time, print the stacks of this process and end it, and so the job. A thread
        of the interpreter does this, so it also works while a C function does not return."""
        late, now = min(LATE_S, seconds / 4), time.monotonic()
        if seconds != self.limit_s or now > self.limited_at + late:
            faulthandler.dump_traceback_later(seconds + late, exit=True, file=self.stderr)
            self.limit_s, self.limited_at = seconds, now

    @staticmethod
    def _keep_modules():
        """Exclude imported and collected objects from garbage collection, which saves a twentieth of all time."""
        gc.collect()
        gc.freeze()

    def _note(self, own):
        """Write this rank's own outcome: the only record of a phase in which the job ends."""
        if self.outcomes:
            self.outcomes.write(json.dumps(own) + "\n")

    def _tell(self, event, content):
        """Write an event of a test, as soon as it happens."""
        if self.events:
            self.events.write(json.dumps([event, content], default=str) + "\n")

    def _tell_report(self, report):
        if report.when != "call" and report.passed and not report.sections and report.duration < QUICK_S:
            self._tell("passed", [report.nodeid, report.when])
        else:
            to_serializable = self.config.hook.pytest_report_to_serializable
            self._tell("report", to_serializable(config=self.config, report=report))

    def pytest_warning_recorded(self, warning_message, when, nodeid, location):
        kind, text = warning_message.category.__name__, str(warning_message.message)
        self._tell("warning", [kind, text, warning_message.filename, warning_message.lineno, when, nodeid, location])

    def pytest_runtest_logstart(self, nodeid):
        self._tell("start", nodeid)

    def pytest_runtest_logfinish(self, nodeid):
        self._tell("finish", nodeid)
