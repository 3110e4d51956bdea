"""One of the processes that share the serial tests; the parent assigns them a file at a time."""

import json
import os
import time

import pytest

from .marks import limit_s
from .worker import START_S, Worker


class Serial(Worker):
    """Pytest plugin that runs the tests of one file after another, as assigned by the parent (Batch.tell)."""

    def __init__(self, config, folder):
        super().__init__(config, 0, folder)
        self.parent = os.getppid()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session):
        """Collect files only. Their tests are collected when they are assigned, not by every process at the start."""
        self.files = {file.path: file for file in session.perform_collect(genitems=False)}
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        for nodeids in self._dealt():
            file = self.files[self.config.rootpath / nodeids[0].partition("::")[0]]
            found = list(session.genitems(file))
            self.config.hook.pytest_collection_modifyitems(session=session, config=self.config, items=found)
            found = {item.nodeid: item for item in found}
            items = [found[nodeid] for nodeid in nodeids]
            self._keep_modules()
            # Everything is torn down after the last test of a file, because the next file may be in any folder.
            for item, following in zip(items, [*items[1:], None]):
                self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return True

    def _dealt(self):
        """The tests that the parent assigns, as soon as they are written, until an empty list."""
        text = b""
        with open(self.folder / "dealt.jsonl", "rb") as file:
            while True:
                *lines, text = (text + file.read()).split(b"\n")
                for line in lines:
                    if not (dealt := json.loads(line)):
                        return
                    yield dealt
                    self._limit(START_S)
                if os.getppid() != self.parent:
                    pytest.exit("the parent has ended")
                time.sleep(0.01)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        self._limit(limit_s(item))

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        self._tell_report(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.OK  # the parent has the reports; only a crash is still an error
