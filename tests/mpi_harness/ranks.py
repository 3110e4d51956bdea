"""The ranks: under mpiexec, all ranks together decide the outcome of a test."""

import io
import math
import os
import time
import zlib
from array import array
from functools import cached_property

import pytest
from _pytest._io import TerminalWriter
from _pytest.config import create_terminal_writer

from .marks import limit_s, needs
from .worker import START_S, Worker

GRACE_S = float(os.environ.get("SPMD_TEST_GRACE", 3))  # time of the others to finish a test that raised on this rank
OUTCOMES = ("passed", "skipped", "failed")


class Ranks(Worker):
    """Pytest plugin of every rank, with or without a parent (parent.py)."""

    def __init__(self, config, rank, folder):
        super().__init__(config, rank, folder)
        self.complaints = []
        self.must_leave = False
        if rank > 0:
            self._hush()

    def _hush(self):
        """Silence this rank: only rank 0 writes to the terminal and to the file of --junitxml."""
        plugins, nowhere = self.config.pluginmanager, open(os.devnull, "w")
        plugins.get_plugin("terminalreporter")._tw = create_terminal_writer(self.config, nowhere)
        for plugin in plugins.get_plugins():
            if type(plugin).__name__ == "LogXML":
                plugin.logfile = os.devnull

    # -- selection of tests

    @cached_property
    def comm(self):
        # Not before collection, so that the modules under test can decide how MPI is initialised. A separate
        # communicator keeps the messages of the harness apart from those of the tests.
        from mpi4py import MPI

        return MPI.COMM_WORLD.Dup()

    def pytest_collectreport(self, report):
        if report.failed:
            self.complaints.append(f"{report.nodeid}:\n{report.longreprtext}")

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self):
        """If one rank cannot collect the tests, all ranks stop."""
        try:
            yield
        except pytest.UsageError as error:
            self.complaints.append(str(error))
            raise
        finally:
            complaints = self.comm.allgather("\n".join(self.complaints))
            if any(complaints) and not self.complaints:
                rank, complaint = next((rank, text) for rank, text in enumerate(complaints) if text)
                pytest.exit(f"rank {rank} of {self.comm.size}: {complaint}", pytest.ExitCode.INTERRUPTED)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        def fits(item):  # every rank would repeat a serial test
            return needs(item).met_by(self.comm.size) if needs(item) else self.comm.size == 1

        config.hook.pytest_deselected(items=[item for item in items if not fits(item)])
        items[:] = [item for item in items if fits(item)]

    def pytest_collection_finish(self):
        self._keep_modules()

    def pytest_report_collectionfinish(self):
        if not self.folder:
            return (
                f"mpi: {self.comm.size} ranks; a test passes if it passes on all. Left out: serial tests and "
                "those for other numbers of ranks (pytest --with-mpi, without mpiexec, runs all)"
            )

    # -- the outcome of each phase of a test: setup, call, teardown

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        self._limit(limit_s(item))

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        own = _outcome(report, self.rank, self.comm.size)
        self._note(own)
        patience = math.inf if call.excinfo is None else GRACE_S
        here, word = f"{report.when} of {report.nodeid}", OUTCOMES.index(report.outcome)
        outcomes = self._meet(here, word, patience)
        if outcomes is None:
            if not self.folder:
                print(f"\n{report.nodeid}: {report.when} {report.outcome} on", tell([own]), file=self.stderr)
                print(f"The other ranks did not come so far within {GRACE_S} s: aborted.", file=self.stderr)
            self._abort()
        return report if set(outcomes) == {0} else self._merge(report, own)

    def _meet(self, place, word, patience):
        """The ``word`` of every rank at this ``place``; None if a rank is at another place or late."""
        mine, theirs = array("q", [zlib.crc32(place.encode()), word]), array("q", [0, 0] * self.comm.size)
        request = self.comm.Iallgather(mine, theirs)
        deadline, pause = time.monotonic() + patience, 0.00001
        while not request.Test():  # MPI's own waits spin, and take the cores from working ranks
            if time.monotonic() > deadline:
                return None
            time.sleep(pause := min(pause * 2, 0.001))
        return theirs[1::2] if set(theirs[::2]) == {mine[0]} else None

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
            # A test that raised on only some ranks may have left messages in flight: under a parent, the next test
            # gets a new job. After a failure on all ranks this is unlikely, and a new job takes seconds.
            self.must_leave = bool(self.folder) and len(failed) < len(everyone)
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        self._tell_report(report)
        if self.must_leave:
            self._tell("leave", report.nodeid)
            if self.rank > 0:
                time.sleep(START_S)  # rank 0 ends this rank after reporting to the parent
            self._abort()

    # -- the end

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        in_order = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if in_order and self.folder:
            session.exitstatus = pytest.ExitCode.OK  # the parent has the reports; only a crash is still an error
        elif not in_order and "comm" in vars(self) and self._meet("the end", 0, GRACE_S) is None:
            self._abort()  # this rank ends early, and the others wait for it

    def pytest_internalerror(self, excrepr):
        if self.rank > 0:  # rank 0 prints it on the terminal
            print(excrepr, file=self.stderr)

    def pytest_keyboard_interrupt(self, excinfo):  # also for pytest.exit()
        if self.rank > 0:
            print(excinfo.exconly(), file=self.stderr)

    def _abort(self):
        self.stderr.flush()
        time.sleep(0.1)  # so that the launcher forwards the output before it is notified of the end
        self.comm.Abort(1)


def _outcome(report, rank, size):
    """The parts of a rank's report that the other ranks and the parent need."""
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
    """The failures of several ranks as one text, with one traceback for all ranks that failed in the same line."""
    alike = {}
    for each in failed:
        alike.setdefault(each["place"], []).append(each)
    return "\n\n".join(
        "\n".join([*(each["headline"] for each in group), group[0]["traceback"]]) for group in alike.values()
    )
