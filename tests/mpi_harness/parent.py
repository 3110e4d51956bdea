"""The parent: pytest without mpiexec runs the MPI tests in jobs, and with --jobs also the serial tests."""

import os
import signal
import tempfile
import time
from collections import Counter, deque
from contextlib import ExitStack

import pytest

from .batch import Batch
from .launch import mpiexec
from .marks import needs


class Parent:
    """Pytest plugin that reports the tests of jobs as if it had run them itself."""

    def __init__(self, config):
        self.jobs = config.getoption("--jobs")
        if config.getoption("usepdb") or config.getoption("capture") == "no":
            self.jobs = 1  # serial tests run in this process, at the terminal
        self.crew = None
        self.shared = tempfile.TemporaryDirectory(prefix="spmd-tests-shared-", ignore_cleanup_errors=True)
        os.environ["SPMD_TEST_SHARED"] = self.shared.name
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # end in order, and stop the jobs

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        """Serial tests first, then the tests of each world size; with several jobs, slow files first."""
        items.sort(key=_size)
        if config.getoption("--only-mpi"):
            config.hook.pytest_deselected(items=[item for item in items if not _size(item)])
            items[:] = [item for item in items if _size(item)]
        if any(map(_size, items)) and mpiexec() is None:
            raise pytest.UsageError("the MPI tests need mpiexec: pip install -e '.[mpich,test]'")
        if self.jobs > 1:
            launching = {item.path for item in items if "mpi_run" in item.fixturenames}
            items.sort(key=lambda item: (_size(item), item.path not in launching))
        self.remote = {item.nodeid: item for item in items if self.jobs > 1 or _size(item)}
        if config.pluginmanager.has_plugin("timeout"):
            for item in self.remote.values():  # the process that runs them enforces their limit
                item.add_marker(pytest.mark.timeout(0), append=False)

    def pytest_report_collectionfinish(self, items):
        sizes = Counter(map(_size, items))
        shared = [f"serial: {self.jobs} processes share {sizes[0]} of them"] * (self.jobs > 1)
        return shared + [f"mpi: mpiexec -n {size} runs {count} of them" for size, count in sizes.items() if size]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        if item.nodeid not in self.remote:
            return None
        if self.crew is None:
            self.crew = Crew(item.config, list(self.remote.values()), self.jobs)
        reports = self.crew.reports_of(item)
        location = reports[0].location  # that of the item would be searched for in its file
        hook = item.config.hook  # that of the item is made for each use
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=location)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=location)
        return True

    def pytest_sessionfinish(self):
        if self.crew:
            self.crew.stop()
        self.shared.cleanup()


def _size(item):
    return needs(item).size if needs(item) else 0


class Crew:
    """The running jobs, a few at a time: one for each world size, and processes that share the serial tests."""

    def __init__(self, config, items, jobs):
        self.config, self.jobs = config, jobs
        self.at_work = []
        self.known = {}  # reports of completed tests
        self.files, self.sizes = {}, {}
        for item in items:
            group = self.sizes.setdefault(_size(item), []) if _size(item) else self.files.setdefault(item.path, [])
            group.append(item)
        self.files, self.sizes = deque(self.files.values()), deque(self.sizes.items())

    def reports_of(self, item):
        while item.nodeid not in self.known:
            while len(self.at_work) < self.jobs and (batch := self.next_batch()):
                self.at_work.append(batch)
            for batch in self.at_work:
                self.known.update(batch.look())
            self.at_work = [batch for batch in self.at_work if batch.waiting]
            time.sleep(0.1)  # a process has the tests of a file, and the next file before the last of them
        return self.known.pop(item.nodeid)

    def next_batch(self):
        """MPI and serial tests in parallel as long as both remain, because some ranks of an MPI test always wait."""
        if self.files and (not self.sizes or all(batch.size for batch in self.at_work)):
            return Batch(self.config, 0, self.files.popleft(), more=self.files)
        return Batch(self.config, *self.sizes.popleft()) if self.sizes else None

    def stop(self):
        """End all jobs, even if ending one of them fails or is interrupted."""
        with ExitStack() as each:
            for batch in self.at_work:
                each.callback(batch.stop)
