"""The parent's side: without mpiexec, pytest runs the serial tests and has the MPI tests run by jobs."""

import json
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from .launch import Job, mpiexec
from .marks import needs
from .ranks import START_S, tell

SLACK_S = 10  # ranks watch their time limits themselves: a job so late cannot even do that


class Parent:
    """Pytest plugin that reports the MPI tests as if it had run them."""

    def __init__(self):
        self.batch = None
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # end in good order, and stop the jobs

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        """Serial tests first, then those of each world size together."""
        items.sort(key=_size)
        if config.getoption("--only-mpi"):
            config.hook.pytest_deselected(items=[item for item in items if not _size(item)])
            items[:] = [item for item in items if _size(item)]
        if any(map(_size, items)) and mpiexec() is None:
            raise pytest.UsageError("the MPI tests need mpiexec: pip install -e '.[mpich,test]'")

    def pytest_report_collectionfinish(self, items):
        sizes = Counter(map(_size, items))
        return [f"mpi: mpiexec -n {size} runs {count} of them" for size, count in sizes.items() if size]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        size = _size(item)
        if not size:
            return None
        if self.batch is None or self.batch.size != size:
            alike = [each for each in item.session.items if _size(each) == size]
            self.batch = Batch(item.config, size, alike)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.batch.reports_of(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self):
        if self.batch:
            self.batch.stop()


def _size(item):
    return needs(item).size if needs(item) else 0


class Batch:
    """The tests of one world size: one job runs them; if it breaks, a new one runs what is left."""

    def __init__(self, config, size, items):
        self.config, self.size = config, size
        self.waiting = {item.nodeid: item for item in items}  # a test leaves when all is known of it
        self.reports = {item.nodeid: [] for item in items}
        self.job = None

    def reports_of(self, item):
        while item.nodeid in self.waiting:
            if self.job is None:
                self.launch()
            ended = self.job.process.poll() is not None  # asked before reading, not to miss the last events
            for event, content in self.new_events():
                self.take(event, content)
            if ended or time.monotonic() > self.deadline:
                self.job.stop()
                self.conclude(ended)
                self.stop()
            else:
                time.sleep(0.01)
        return self.reports[item.nodeid]

    def launch(self):
        self.temporary = tempfile.TemporaryDirectory(prefix="spmd-tests-")
        self.folder = Path(self.temporary.name)
        tests = (f"{self.config.rootpath}/{nodeid}" for nodeid in self.waiting)
        (self.folder / "tests").write_text("\n".join(tests))
        self.events = open(self.folder / "events.jsonl", "w+b")
        self.unread = b""
        self.running = self.finished = None  # tests of this job
        self.left = False  # did the ranks end it themselves, as a test had failed?
        self._extend_deadline(START_S)
        with open(self.folder / "output", "wb") as output:
            self.job = Job(
                self.size,
                ["-m", "pytest", "--with-mpi", *_options_of(self.config), f"@{self.folder}/tests"],
                env={"SPMD_TEST_FOLDER": str(self.folder), "PYTEST_ADDOPTS": ""},
                stdout=output,
                stderr=output,
            )

    def stop(self):
        if self.job:
            self.job.stop()
            self.events.close()
            self.temporary.cleanup()
            self.job = None

    def _extend_deadline(self, limit_s):
        self.limit_s, self.deadline = limit_s, time.monotonic() + limit_s + SLACK_S

    # -- while the job runs: what the ranks tell (Ranks._tell)

    def new_events(self):
        *lines, self.unread = (self.unread + self.events.read()).split(b"\n")
        return map(json.loads, lines)

    def take(self, event, content):
        if event == "start":
            self.running = content
        elif event == "report":
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=content)
            if isinstance(report.longrepr, list):  # why and where it was skipped: a tuple, before JSON had it
                report.longrepr = tuple(report.longrepr)
            self.reports[report.nodeid].append(report)
        else:
            self.running, self.finished, self.left = None, content, event == "leave"
            if len(self.waiting) > 1:  # the last test is done when the job has ended, and ended well
                del self.waiting[content]
        self._extend_deadline(needs(self.waiting[self.running]).limit_s if self.running else START_S)

    # -- when the job is over: which tests did that cost, and why?

    def conclude(self, ended):
        done = list(self.waiting) == [self.finished]
        if self.running:
            victims, moment = [self.running], "during"
        elif self.left or (done and self.job.process.returncode == 0):
            victims, moment = [], ""
        elif done:
            victims, moment = [self.finished], "after"
        elif self.finished:
            victims, moment = list(self.waiting)[:1], "before"
        else:  # not one test has begun, and none would the next time
            victims, moment = list(self.waiting), "before"
        end = f"ended with exit code {self.job.process.returncode}" if ended else "had to be killed"
        for nodeid in victims:
            self.reports[nodeid].append(self.failure(nodeid, f"mpiexec -n {self.size} {end} {moment}"))
        for nodeid in victims + [self.finished] * done:
            self.waiting.pop(nodeid, None)

    def failure(self, nodeid, what_happened):
        """The report of a phase that not all ranks came through."""
        phase = self._next_phase(nodeid)
        own = [each for each in self._notes() if (each["nodeid"], each["when"]) == (nodeid, phase)]
        raised = [each for each in own if each["outcome"] == "failed"]
        missing = sorted(set(range(self.size)) - {each["rank"] for each in own})
        what_happened += f" the {phase} of this test" + f"; no outcome from ranks {missing}" * bool(missing)
        last_words = [self._text(f"stderr{rank}") for rank in range(self.size)]
        if any("Timeout (" in text for text in last_words):  # faulthandler's
            what_happened = f"No end of the {phase} within {self.limit_s:g} s. Where the ranks were:"
        words = [tell(raised), what_happened] if raised else [what_happened]
        words += [f"rank {rank} of {self.size}:\n{text}" for rank, text in enumerate(last_words) if text]
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
        if not self.reports[nodeid]:
            return "setup"
        last = self.reports[nodeid][-1]
        return "call" if last.when == "setup" and last.passed else "teardown"

    def _notes(self):
        for path in sorted(self.folder.glob("rank*.jsonl")):
            yield from map(json.loads, path.read_text().splitlines())

    def _text(self, name):
        """The end of a file of the job, without the frames of pytest in its stacks."""
        path = self.folder / name
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        theirs = ("/_pytest/", "/pytest/", "/pluggy/", "<frozen runpy>")
        return "\n".join([line for line in lines if not any(part in line for part in theirs)][-40:])


def _options_of(config):
    """What decides how a test is loaded and run goes along; what selects and reports tests stays here."""
    option = config.option
    yield from ("--rootdir", str(config.rootpath), "--import-mode", option.importmode, "--tb", option.tbstyle)
    if config.inipath:
        yield from ("-c", str(config.inipath))
    for name, values in (("-p", option.plugins), ("-o", option.override_ini), ("-W", option.pythonwarnings)):
        for value in values or ():
            yield from (name, value)
    yield from ("-p", "no:cacheprovider", "-o", "addopts=", "--no-header", "--no-summary", "--color=no", "-q")
