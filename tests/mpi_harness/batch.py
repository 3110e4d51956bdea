"""A set of tests and the job that runs it: mpiexec for tests of one world size, one process for serial tests."""

import builtins
import json
import tempfile
import time
import warnings
from itertools import groupby
from pathlib import Path

import pytest

from .launch import Job
from .marks import limit_s
from .ranks import tell
from .worker import START_S

SLACK_S = 10  # jobs enforce their time limits themselves; a job that is later than this is stuck


class Batch:
    """Tests of one world size, or serial tests (size 0), run by one job; if it breaks, a new job runs the rest.

    Serial tests are assigned a file at a time: first `items`, then the lists of items that remain in `more`.
    """

    def __init__(self, config, size, items, more=()):
        self.config, self.size, self.more = config, size, more
        self.waiting, self.reports, self.last = {}, {}, {}
        self.job = None
        self.add(items)

    def add(self, items):
        self.waiting |= {item.nodeid: item for item in items}  # removed when its result is complete
        self.reports |= {item.nodeid: [] for item in items}

    def look(self):
        """The reports of the tests that were completed since the last call."""
        if self.job is None:
            self.launch()
        ended = self.job.process.poll() is not None  # checked before reading, so that no event is missed
        for event, content in self.new_events():
            self.take(event, content)
        if ended or time.monotonic() > self.deadline:
            self.job.stop()
            self.conclude(ended)
            self.stop()
        done = [nodeid for nodeid in self.reports if nodeid not in self.waiting]
        return {nodeid: self.reports.pop(nodeid) for nodeid in done}

    def launch(self):
        # A killed job may create a file while its folder is removed; this must not prevent stopping other jobs.
        self.temporary = tempfile.TemporaryDirectory(prefix="spmd-tests-", ignore_cleanup_errors=True)
        self.folder = Path(self.temporary.name)
        self.events = open(self.folder / "events.jsonl", "w+b")
        self.unread = b""
        self.running = self.finished = None  # tests of this job
        self.left = False  # whether the ranks ended it themselves after a failed test
        self._extend_deadline(START_S)
        environment = {"SPMD_TEST_FOLDER": str(self.folder), "PYTEST_ADDOPTS": ""}
        if self.size:
            tests = [f"{self.config.rootpath}/{nodeid}" for nodeid in self.waiting]
        else:
            environment["OPENBLAS_NUM_THREADS"] = "1"  # these processes share the cores
            files = _by_file(self.waiting.values())
            tests = dict.fromkeys(str(items[0].path) for items in (*files, *self.more))
            for items in files:
                self.tell(items)
        (self.folder / "tests").write_text("\n".join(tests))
        with open(self.folder / "output", "wb") as output:
            self.job = Job(
                self.size,
                ["-m", "pytest", "--with-mpi", *_options_of(self.config), f"@{self.folder}/tests"],
                env=environment,
                stdout=output,
                stderr=output,
            )

    def tell(self, items):
        """Assign the items of one file to the job; an empty list means that none follow (serial.py)."""
        with open(self.folder / "dealt.jsonl", "a") as file:
            file.write(json.dumps([item.nodeid for item in items]) + "\n")

    def stop(self):
        if self.job:
            self.job.stop()
            self.events.close()
            self.temporary.cleanup()
            self.job = None

    def _extend_deadline(self, limit_s):
        self.limit_s, self.deadline = limit_s, time.monotonic() + limit_s + SLACK_S

    # -- while the job runs: the events of the ranks (Ranks._tell)

    def new_events(self):
        *lines, self.unread = (self.unread + self.events.read()).split(b"\n")
        return map(json.loads, lines)

    def take(self, event, content):
        if event == "start":
            self.running = content
        elif event == "report":
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=content)
            if isinstance(report.longrepr, list):  # place and reason of a skip; JSON turned the tuple into a list
                report.longrepr = tuple(report.longrepr)
            self.reports[report.nodeid].append(report)
            self.last[report.nodeid] = report.when, report.passed
        elif event == "passed":  # a setup or a teardown, without a report
            nodeid, when = content
            self.last[nodeid] = when, True
        elif event == "warning":
            self.warn(*content)
        else:
            self.running, self.finished, self.left = None, content, event == "leave"
            if len(self.waiting) == 1 and not self.size:
                items = self.more.popleft() if self.more else []
                self.add(items)
                self.tell(items)
            if len(self.waiting) > 1:  # the last test is complete when the job has ended without an error
                del self.waiting[content]
        self._extend_deadline(limit_s(self.waiting[self.running]) if self.running else START_S)

    def warn(self, kind, text, file, line, when, nodeid, location):
        category = getattr(builtins, kind, UserWarning)
        message = warnings.WarningMessage(category(text), category, file, line)
        arguments = {"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
        self.config.hook.pytest_warning_recorded.call_historic(kwargs=arguments)

    # -- after the job: which tests failed because it ended, and why

    def conclude(self, ended):
        done = list(self.waiting) == [self.finished]
        if self.running:
            # A rank that exits early may end rank 0 before rank 0 has written that the test finished.
            victims, moment = [self.running], "after" if self._all_ranks_finished(self.running) else "during"
        elif self.left or (done and self.job.process.returncode == 0):
            victims, moment = [], ""
        elif done:
            victims, moment = [self.finished], "after"
        elif self.finished:
            victims, moment = list(self.waiting)[:1], "before"
        else:  # no test has started, and none would start in a new job
            victims, moment = list(self.waiting), "before"
        job = f"mpiexec -n {self.size}" if self.size else "the process of this test"
        end = f"ended with exit code {self.job.process.returncode}" if ended else "had to be killed"
        for nodeid in victims:
            self.reports[nodeid].append(self.failure(nodeid, f"{job} {end} {moment}"))
        for nodeid in victims + [self.finished] * done:
            self.waiting.pop(nodeid, None)

    def failure(self, nodeid, what_happened):
        """The report of a phase that not all ranks completed."""
        phase = self._next_phase(nodeid)
        own = [each for each in self._notes() if (each["nodeid"], each["when"]) == (nodeid, phase)]
        raised = [each for each in own if each["outcome"] == "failed"]
        missing = sorted(set(range(self.size)) - {each["rank"] for each in own})
        what_happened += f" the {phase} of this test" + f"; no outcome from ranks {missing}" * bool(missing)
        last_words = [self._text(f"stderr{rank}") for rank in range(self.size or 1)]
        if any("Timeout (" in text for text in last_words):  # printed by faulthandler
            what_happened = f"No end of the {phase} within {self.limit_s:g} s. Where it was:"
        words = [tell(raised), what_happened] if raised else [what_happened]
        words += [f"rank {rank} of {self.size or 1}:\n{text}" for rank, text in enumerate(last_words) if text]
        if len(words) == 1:
            words.append(self._text("output"))
        item = self.waiting[nodeid]
        return pytest.TestReport(
            nodeid,
            item.location,
            dict.fromkeys(item.keywords, 1),
            "failed",
            longrepr="\n\n".join(words),
            when=phase,
            sections=[section for each in raised for section in each["sections"]],
        )

    def _next_phase(self, nodeid):
        if nodeid not in self.last:
            return "setup"
        return "call" if self.last[nodeid] == ("setup", True) else "teardown"

    def _all_ranks_finished(self, nodeid):
        ranks = {note["rank"] for note in self._notes() if (note["nodeid"], note["when"]) == (nodeid, "teardown")}
        return len(ranks) == self.size > 0

    def _notes(self):
        for path in sorted(self.folder.glob("rank*.jsonl")):
            yield from map(json.loads, path.read_text().splitlines())

    def _text(self, name):
        """The end of a file of the job, without stack frames of pytest."""
        path = self.folder / name
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        theirs = ("/_pytest/", "/pytest/", "/pluggy/", "<frozen runpy>")
        return "\n".join([line for line in lines if not any(part in line for part in theirs)][-40:])


def _by_file(items):
    return [list(group) for _, group in groupby(items, key=lambda item: item.path)]


def _options_of(config):
    """The options for loading and running tests; those for selecting and reporting apply only to the parent."""
    option = config.option
    yield from ("--rootdir", str(config.rootpath), "--import-mode", option.importmode, "--tb", option.tbstyle)
    if config.inipath:
        yield from ("-c", str(config.inipath))
    for name, values in (("-p", option.plugins), ("-o", option.override_ini), ("-W", option.pythonwarnings)):
        for value in values or ():
            yield from (name, value)
    if option.markexpr == "not soak":  # of long cases the processes make no items; other marks would leave out files
        yield from ("-m", option.markexpr)
    if option.cost:
        yield from ("--cost", option.cost)
    yield from ("-p", "no:cacheprovider", "-o", "addopts=", "--no-header", "--no-summary", "--color=no", "-q")
