"""The ranks' side: under mpiexec, a test's outcome is the outcome of all ranks."""

import faulthandler
import io
import json
import math
import os
import time
import zlib
from array import array

import pytest
from _pytest._io import TerminalWriter
from _pytest.config import create_terminal_writer

from .marks import needs

GRACE_S = 3  # what the other ranks get to finish a test that raised on this one
START_S = 60  # from the launch to the first test
OUTCOMES = ("passed", "skipped", "failed")


class Ranks:
    """Pytest plugin of every rank. `folder` is where a parent (parent.py) reads what becomes of the tests."""

    def __init__(self, config, rank, folder):
        self.config, self.rank, self.folder = config, rank, folder
        self.comm = None
        self.collect_errors = ""
        self.must_leave = False
        # A copy of stderr, as pytest captures the real one. Under a parent every rank has its own file.
        self.stderr = open(folder / f"stderr{rank}", "w") if folder else os.fdopen(os.dup(2), "w")
        self._limit(START_S)
        if rank > 0:
            self._hush()

    def _hush(self):
        """Only rank 0 writes to the terminal, and the file of --junitxml."""
        plugins, nowhere = self.config.pluginmanager, open(os.devnull, "w")
        plugins.get_plugin("terminalreporter")._tw = create_terminal_writer(self.config, nowhere)
        for plugin in plugins.get_plugins():
            if type(plugin).__name__ == "LogXML":
                plugin.logfile = os.devnull

    def _limit(self, seconds):
        """Unless called again in time, print where this rank hangs and end it, and so the job. A thread of
        the interpreter's does it, so that a C function which never returns is no escape."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.stderr)

    # -- which tests

    def pytest_collectreport(self, report):
        if report.failed:
            self.collect_errors += f"rank {self.rank}: {report.nodeid}:\n{report.longreprtext}\n"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        # Only now, so that the modules under test have had their say about how MPI is initialised.
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD.Dup()  # tests cannot meddle with our messages, nor we with theirs
        errors = [each for each in self.comm.allgather(self.collect_errors) if each]
        if errors and not self.collect_errors:  # those that have errors of their own stop anyway
            pytest.exit(errors[0], returncode=pytest.ExitCode.INTERRUPTED)

        def fits(item):  # a serial test would be repeated by every rank
            return needs(item).met_by(self.comm.size) if needs(item) else self.comm.size == 1

        config.hook.pytest_deselected(items=[item for item in items if not fits(item)])
        items[:] = [item for item in items if fits(item)]

    def pytest_report_collectionfinish(self):
        if not self.folder:
            return (
                f"mpi: this is mpiexec -n {self.comm.size}, a test passes if it passes on all ranks. Left out: serial "
                "tests, those for other numbers of ranks. Without mpiexec, pytest --with-mpi runs them all"
            )

    # -- the outcome of each phase of a test: setup, call, teardown

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        self._limit(needs(item).limit_s if needs(item) else START_S)

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        own = _outcome(report, self.rank, self.comm.size)
        self._note(own)
        patience = math.inf if call.excinfo is None else GRACE_S
        if not self._all_come_to(f"{report.when} of {report.nodeid}", patience):
            if not self.folder:
                print(f"\n{report.nodeid}: {report.when} {report.outcome} on", tell([own]), file=self.stderr)
                print(f"The other ranks did not come so far within {GRACE_S} s: aborted.", file=self.stderr)
            self._abort()
        return self._merge(report, own)

    def _all_come_to(self, place, patience):
        """Wait till every rank is here; False if one is elsewhere, or does not come in time."""
        mine, theirs = array("q", [zlib.crc32(place.encode())]), array("q", [0] * self.comm.size)
        request = self.comm.Iallgather(mine, theirs)
        deadline, polls = time.monotonic() + patience, 0
        while not request.Test():
            if time.monotonic() > deadline:
                return False
            polls += 1
            time.sleep(0 if polls < 50 else 0.001)  # MPI's own waits spin, and take the cores from the others
        return set(theirs) == set(mine)

    def _merge(self, report, own):
        """Make this rank's report the report of all ranks."""
        everyone = self.comm.allgather(own)
        failed = [each for each in everyone if each["outcome"] == "failed"]
        outcomes = {each["outcome"] for each in everyone}
        if failed:
            report.longrepr = tell(failed)
            report.sections = [section for each in failed for section in each["sections"]]
        elif len(outcomes) > 1:
            report.longrepr = "the ranks disagree: " + ", ".join(
                f"{each['outcome']} on rank {each['rank']}" for each in everyone
            )
        if failed or len(outcomes) > 1:
            report.outcome = "failed"
            # What raised on some ranks only may have left messages under way: under a parent the next test
            # gets a fresh job. What raised on all has hardly done so, and a new job takes its seconds.
            self.must_leave = bool(self.folder) and len(failed) < len(everyone)
        return report

    # -- what the parent reads

    def _note(self, own):
        """Every rank's own outcomes: all there is of a phase that the job does not survive."""
        if self.folder:
            with open(self.folder / f"rank{self.rank}.jsonl", "a") as file:
                file.write(json.dumps(own) + "\n")

    def _tell(self, event, content):
        """What happens to the tests on all ranks, as it happens."""
        if self.folder and self.rank == 0:
            with open(self.folder / "events.jsonl", "a") as file:
                file.write(json.dumps([event, content], default=str) + "\n")

    def pytest_runtest_logstart(self, nodeid):
        self._tell("start", nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        to_serializable = self.config.hook.pytest_report_to_serializable
        self._tell("report", to_serializable(config=self.config, report=report))
        if self.must_leave:
            self._tell("leave", report.nodeid)
            if self.rank > 0:
                time.sleep(START_S)  # rank 0 ends this, when it has told the parent
            self._abort()

    def pytest_runtest_logfinish(self, nodeid):
        self._tell("finish", nodeid)

    # -- a rank that ends early takes the others along, which would wait for it

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus):
        early = exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
        if early and self.comm and not self._all_come_to("the end", GRACE_S):
            self._abort()

    def pytest_internalerror(self, excrepr):
        if self.rank > 0:
            print(excrepr, file=self.stderr)

    def _abort(self):
        self.stderr.flush()
        time.sleep(0.1)  # the launcher passes on what was printed before it hears of the end
        self.comm.Abort(1)


def _outcome(report, rank, size):
    """What the other ranks and the parent need to know of a rank's report."""
    where, crash = f"rank {rank} of {size}", getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else report.longreprtext
    writer = TerminalWriter(io.StringIO())
    report.toterminal(writer)
    return {
        "rank": rank,
        "nodeid": report.nodeid,
        "when": report.when,
        "outcome": report.outcome,
        "headline": f"{where}: {message.partition(chr(10))[0]}",
        "place": f"{crash.path}:{crash.lineno}" if crash else message,
        "traceback": writer._file.getvalue().strip("\n"),
        "sections": [(f"{title}, {where}", content) for title, content in report.sections],
    }


def tell(failed):
    """Several ranks' failures in one text; one traceback does for all that failed in the same line."""
    alike = {}
    for each in failed:
        alike.setdefault(each["place"], []).append(each)
    return "\n\n".join(
        "\n".join([*(each["headline"] for each in group), group[0]["traceback"]]) for group in alike.values()
    )
