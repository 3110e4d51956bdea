"""`--cost FILE`: what the tests cost in CPU seconds, as a table of their files.

Processes whose launcher was killed before them are not counted: the system reports their time to no process.
"""

import ast
import json
import os
import platform
import resource
from collections import defaultdict
from pathlib import Path

import pytest

from .marks import needs

COLUMNS = "CPU s | in the test's process | as MPI ranks of a job | in processes that it starts | tests | file | covers"
MOST = 40  # of the most expensive tests are listed


def spent():
    """CPU seconds of this process, and of the processes that it has started and that have ended."""
    own, started = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime, started.ru_utime + started.ru_stime


class Recorder:
    """Pytest plugin of a process that runs tests: a line for each test in a file of the folder."""

    def __init__(self, folder):
        self.file = open(folder / f"cost-{os.getpid()}.jsonl", "w", buffering=1)
        self.began, self.in_tests = (0.0, 0.0), 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        before = spent()
        result = yield
        own, started = (after - then for after, then in zip(spent(), before, strict=True))
        self.in_tests += own
        self.file.write(json.dumps([item.nodeid, *((0, own) if needs(item) else (own, 0)), started]) + "\n")
        return result

    def pytest_unconfigure(self):
        self.file.write(json.dumps(["", spent()[0] - self.in_tests, 0, 0]) + "\n")
        self.file.close()


class Table:
    """Pytest plugin of the parent: it adds up what the processes have recorded, and writes the table."""

    def __init__(self, config, folder):
        self.config, self.folder, self.path = config, folder, Path(config.getoption("--cost"))

    @pytest.hookimpl(tryfirst=True)  # before the parent removes the folder
    def pytest_sessionfinish(self):
        tests, others = defaultdict(lambda: [0.0] * 3), [spent()[0]]
        for path in self.folder.glob("cost-*.jsonl"):
            for nodeid, *costs in map(json.loads, path.read_text().splitlines()):
                if nodeid:
                    tests[nodeid] = [x + y for x, y in zip(tests[nodeid], costs, strict=True)]
                else:
                    others.append(costs[0])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.table(tests, others))

    def table(self, tests, others):
        files, folders = defaultdict(list), defaultdict(list)
        for nodeid, costs in tests.items():
            files[nodeid.partition("::")[0]].append(costs)
        for file, costs in files.items():
            folders["/".join(file.split("/")[:2])] += costs
        total = sum(map(sum, tests.values())) + sum(others)
        lines = [f"{total:.0f} CPU s of {len(tests)} tests in {len(files)} files, Python {platform.python_version()};"]
        lines += [f"{sum(others):.0f} s of them: {len(others)} processes import, collect and report", "", COLUMNS]
        for file, costs in sorted(files.items(), key=_cost, reverse=True):
            parts = " ".join(f"{sum(part):7.1f}" for part in zip(*costs, strict=True))
            covers = ast.get_docstring(ast.parse((self.config.rootpath / file).read_text())) or "?"
            lines.append(f"{_cost((file, costs)):7.1f} {parts} {len(costs):5} {file:50} {covers.splitlines()[0]}")
        lines += ["", "by folder"]
        for folder, costs in sorted(folders.items(), key=_cost, reverse=True):
            lines.append(f"{_cost((folder, costs)):7.1f} {len(costs):5} tests  {folder}")
        lines += ["", "the most expensive tests"]
        dearest = sorted(((sum(costs), nodeid) for nodeid, costs in tests.items()), reverse=True)[:MOST]
        return "\n".join([*lines, *(f"{cost:7.2f} {nodeid}" for cost, nodeid in dearest)]) + "\n"


def _cost(entry):
    return sum(map(sum, entry[1]))
