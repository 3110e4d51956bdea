"""The planner beside a job: what it is asked, and what its answers predict."""

import json
import subprocess
import sys
import tempfile
from time import monotonic, sleep

import pytest

from spmd_engine.adaptive.candidates import Outlook
from spmd_engine.adaptive.monitor import Observation
from spmd_engine.adaptive.planner_process import PlannerProposals, machine_of
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.reshape import Shape
from spmd_engine.training import TrainConfig
from spmd_engine.training.train_config import AdaptConfig
from support.alive import is_alive

MIB = 1 << 20


@pytest.fixture
def proposals():
    job = TrainConfig.of(model="mlp", batch_size=12).as_json()  # which is planned soon
    proposals = PlannerProposals(AdaptConfig(), job)
    yield proposals
    proposals.close()


def outlook(computing, used=0.95, limit=3 * MIB):
    seen = Observation(20, 80, 1.0, computing, (0.1, 0.1), (1.0, 0.5), (used, used))
    shape = Shape(ParallelConfig(mesh={"data": 2}), (0, 1))
    return Outlook(seen, shape, [0.5 / seconds for seconds in computing], [limit, limit])


def test_an_answer_has_shapes_by_speed_that_relieve_memory(proposals):
    asked = outlook((0.45, 0.9))
    assert not list(proposals(asked))
    end = monotonic() + 120
    while not (found := list(proposals(asked))) and monotonic() < end:
        sleep(0.05)
    assert found and all(each.memory_pressure <= 0.9 for each in found)
    best = min(found, key=lambda each: each.factor * asked.step_seconds(each.shape))
    assert best.factor * asked.step_seconds(best.shape) < 0.9  # than 1 s
    ((first, second),) = best.shape.composition.work_shares.values()
    assert 1.2 <= first / second <= 2.5
    again = outlook((0.9, 0.9))  # of other speeds, the same shape takes other seconds
    assert best.factor * again.step_seconds(best.shape) > best.factor * asked.step_seconds(best.shape)
    assert list(proposals(asked)) == found and proposals._process is None  # what is answered is not asked again


def test_without_a_crossed_threshold_the_planner_is_not_asked(proposals):
    assert not list(proposals(outlook((0.9, 0.9), used=0.5))) and proposals._process is None


def test_a_search_that_goes_on_ends_with_the_run(proposals):
    list(proposals(outlook((0.45, 0.9))))
    process = proposals._process
    proposals.close()
    assert process.returncode is not None


STARTS = """
import os, subprocess, sys, time
command = [sys.executable, "-m", "spmd_engine.adaptive.planner_process", str(os.getpid())]
print(subprocess.Popen(command, start_new_session=True).pid, flush=True)
time.sleep(600)
"""


def test_the_process_ends_when_the_job_is_killed():
    """At any moment: here while it starts, or waits for the end of its question, which never comes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", STARTS], **pipes) as parent:
        process = int(parent.stdout.readline())
        parent.kill()
        end = monotonic() + 60
        while is_alive(process) and monotonic() < end:
            sleep(0.05)
        alive = is_alive(process)
    assert not alive


@pytest.mark.parametrize(
    "content",
    ["", "x", "3", "[3]", '[{"composition": {}}]', "[" * 100_000, '[{"composition": {"mesh": {"data": 1e9}}}]']
    + [json.dumps([{"composition": {"mesh": {"data": n}}, "seconds": 1, "pressure": 0.5}]) for n in (3, 10**30)]
    + [json.dumps([{"composition": {"mesh": {"data": 2}}, "seconds": "x", "pressure": 0.5}])],
)
def test_an_answer_that_cannot_be_read_is_a_warning(proposals, caplog, content):
    proposals._asked, proposals._output = outlook((0.45, 0.9)), tempfile.TemporaryFile()
    proposals._output.write(content.encode())
    assert proposals._answer(0) == [] and len(caplog.messages) == 1 and "\n" not in caplog.text.strip()


def test_each_rank_has_its_measured_speed_and_the_links_of_the_machine():
    machine = machine_of([1.0, 0.5, 1.0])
    assert machine.ranks == 3 and machine.heterogeneous
    assert machine.speed(1, "float32", 1e9) == pytest.approx(machine.speed(0, "float32", 1e9) / 2)
    assert machine.link(0, 1) == machine.link(1, 2)
