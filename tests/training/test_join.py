"""Ranks of a second launcher join a running job, between two steps, and the job computes what one rank computes."""

import json
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from random_jobs import RandomJob, losses_in
from spmd_engine import TrainConfig, run_threads, train
from spmd_engine.adaptive import ShapeRequest
from spmd_engine.adaptive.joining import Joining, JoinRequest, LockedFile, runs
from spmd_engine.errors import UsageError
from spmd_engine.training.join import join
from test_shape_changes import (
    ADAPTERS,
    EXPERTS,
    IMAGES,
    TEXT_MODEL,
    assert_same,
    drawn_requests,
    events,
    job_of,
    small_job,
    trained,
)


@contextmanager
def joining_ranks(folder, *groups):
    """While open, groups of virtual ranks, (number, request), join the run in the folder, one after the other."""
    outcomes = [None] * len(groups)

    def start():
        for number, (ranks, request) in enumerate(groups):
            begun(folder)
            thread = threading.Thread(target=run_group, args=(number, ranks, request), daemon=True)
            thread.start()
            threads.append(thread)
            while thread.is_alive() and len(events(folder, "joined")) <= number:
                time.sleep(0.01)

    def run_group(number, ranks, request):
        try:
            outcomes[number] = run_threads(lambda: join(folder, request, wait=60.0), ranks)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=start, daemon=True)]
    threads[0].start()
    yield outcomes
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def joins_after(monkeypatch):
    """``joins_after(steps)``: ranks join the job just after these steps, however long they take to ask for it."""

    def set_steps(*steps):
        is_ready = Joining.is_ready

        def at_these_steps(joining, world):
            path = joining._folder / "metrics.jsonl"
            step = path.read_text().count("\n") + 1
            if step not in steps or path.parent.name == "alone":
                return False
            until = time.monotonic() + 60
            while not is_ready(joining, world):
                assert time.monotonic() < until
                time.sleep(0.01)
            return True

        monkeypatch.setattr(Joining, "is_ready", at_these_steps)

    return set_steps


def begun(folder):
    """Wait until a run in the folder can be joined."""
    while not (folder / "events.jsonl").exists() or not runs(folder):
        time.sleep(0.01)


@pytest.mark.parametrize(
    "seed", [EXPERTS, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (TEXT_MODEL, IMAGES, ADAPTERS, 7, 12))]
)
def test_random_changes_and_two_joins_change_no_result(tmp_path, joins_after, seed):
    """Two ranks, then three, then four; the first join also changes the shape, and the second waits idle for one."""
    job = job_of(seed, tmp_path, save_every=4, check_replicas_every=1, save_in_background=True)
    joins_after(3, 7)
    axes, how = job._place(3)
    first = ShapeRequest({"mesh": axes, **how}, ranks=[0, 1, 2])
    requests = drawn_requests(job, 2, joins=(3, 7))
    axes, how = job._place(4)
    requests[9] = ShapeRequest({"mesh": axes, **how})
    with joining_ranks(tmp_path / "run", (1, first), (1, None)) as outcomes:
        trained(job, tmp_path / "run", 2, requests)
    trained(job, tmp_path / "alone", 1, {})
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
    assert [(each["step"], each["ranks"]) for each in events(tmp_path / "run", "joined")] == [(3, [2]), (7, [3])]
    reshaped = events(tmp_path / "run", "reshaped")
    assert len(reshaped) >= 4 and reshaped[-2]["ranks"] == [0, 1, 2, 3], reshaped
    assert_same(tmp_path / "run", tmp_path / "alone")
    assert not list((tmp_path / "run").glob("join*"))
