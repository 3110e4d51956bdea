"""One of the processes that share the serial tests: the parent deals them out, a file at a time."""

import json
import os
import time

import pytest

from .marks import limit_s
from .worker import START_S, Worker


class Serial(Worker):
    """Pytest plugin that runs the tests of one file after another, as the parent says (Batch.tell)."""

    def __init__(self, config, folder):
        super().__init__(config, 0, folder)
        self.parent = os.getppid()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session):
        """Files alone: their tests are collected when they are dealt out, not by all processes before the first."""
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
            # After a file's last test nothing stays set up: the next file may be of any folder.
            for item, following in zip(items, [*items[1:], None]):
                self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return True

    def _dealt(self):
        """What the parent has written, as soon as it has, until it says that this is all."""
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
            session.exitstatus = pytest.ExitCode.OK  # the parent knows; only a crash now is news to it
