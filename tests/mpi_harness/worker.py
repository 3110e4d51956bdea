"""A process that runs tests for a parent: it says what becomes of them, and ends where one of them hangs."""

import faulthandler
import gc
import json
import math
import os
import time

START_S = 180  # from the launch to the first test
GARBAGE = 5000  # objects made and not yet freed that have Python look for cycles among them: 700 by default
LATE_S = 1  # a limit may end so much later: setting one starts a thread, and there are three for each small test


class Worker:
    """Pytest plugin; `folder` is where the parent reads (parent.py). Without one there is nobody to be told."""

    def __init__(self, config, rank, folder):
        self.config, self.rank, self.folder = config, rank, folder
        # A copy of stderr, as pytest captures the real one. Under a parent every process has its own file.
        self.stderr = open(folder / f"stderr{rank}", "w") if folder else os.fdopen(os.dup(2), "w")
        self.events = open(folder / "events.jsonl", "a", buffering=1) if folder and rank == 0 else None
        self.outcomes = open(folder / f"rank{rank}.jsonl", "a", buffering=1) if folder else None
        self.limit_s, self.limited_at = None, -math.inf
        self._limit(START_S)

    def _limit(self, seconds):
        """Unless called again in time, print where this process hangs and end it, and so the job. A thread of
        the interpreter's does it, so that a C function which never returns is no escape."""
        late, now = min(LATE_S, seconds / 4), time.monotonic()
        if seconds != self.limit_s or now > self.limited_at + late:
            faulthandler.dump_traceback_later(seconds + late, exit=True, file=self.stderr)
            self.limit_s, self.limited_at = seconds, now

    @staticmethod
    def _keep_modules():
        """What has been imported and collected stays: looking through it for garbage takes a twentieth of all time."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE)

    def _note(self, own):
        """Every rank's own outcomes: all there is of a phase that the job does not survive."""
        if self.outcomes:
            self.outcomes.write(json.dumps(own) + "\n")

    def _tell(self, event, content):
        """What happens to the tests, as it happens."""
        if self.events:
            self.events.write(json.dumps([event, content], default=str) + "\n")

    def _tell_report(self, report):
        to_serializable = self.config.hook.pytest_report_to_serializable
        self._tell("report", to_serializable(config=self.config, report=report))

    def pytest_warning_recorded(self, warning_message, when, nodeid, location):
        kind, text = warning_message.category.__name__, str(warning_message.message)
        self._tell("warning", [kind, text, warning_message.filename, warning_message.lineno, when, nodeid, location])

    def pytest_runtest_logstart(self, nodeid):
        self._tell("start", nodeid)

    def pytest_runtest_logfinish(self, nodeid):
        self._tell("finish", nodeid)
