"""A measured trace compared with a predicted one, split by hand."""

import pytest

from spmd_engine.planning.machine.machine import parse_machine
from spmd_engine.planning.simulator.check_prediction import compare_trace
from spmd_engine.planning.simulator.simulation import COMMUNICATION, COMPUTE, Prediction
from spmd_engine.training.train_config import TrainConfig
from spmd_engine.training.workload import step_of

MACHINE = parse_machine("""
name = "m"
[[nodes]]
name = "n"
ranks = 2
cores = 1
memory = 1e9
memory_bandwidth = 1e15
[nodes.speeds]
float32 = 1e9
[nodes.inside]
latency = 0
bandwidth = 1e9
""")


def event(rank, name, kind, begin, end):
    return {"ph": "X", "pid": rank, "name": name, "cat": kind, "ts": begin * 1e6, "dur": (end - begin) * 1e6}


def test_waits_inside_layers_are_no_computation_and_two_ranks_share_a_core():
    trace = {
        "traceEvents": [
            event(0, "a", COMPUTE, 0, 6),
            event(0, "receive", COMMUNICATION, 1, 2),
            event(0, "receive", COMMUNICATION, 3, 5),
            event(1, "a", COMPUTE, 0, 1),
            event(1, "barrier", COMMUNICATION, 1, 6),
        ]
    }
    spans = ("a", COMPUTE, 0.0, 3.0), ("receive", COMMUNICATION, 3.0, 4.0)
    predicted = Prediction(4.0, (0,), {0: spans}, {})
    found = compare_trace("run", trace, 1, 7.0, predicted, MACHINE)
    assert found.measured.layers == {"a": pytest.approx(4)}  # of both ranks: 3 and 1
    # in the first second, both compute on one core: one second of the two is lost
    assert found.measured.parts == pytest.approx({"compute": 1.5, "contention": 0.5, "waiting": 4, "rest": 1})
    assert found.predicted.parts == pytest.approx({"compute": 3, "contention": 0, "waiting": 1, "rest": 0})
    assert sum(found.differences().values()) == pytest.approx(4 - 7)


def test_a_predicted_step_has_samples_of_the_length_of_the_job():
    job = TrainConfig.of(model="gpt-nano", length=16, batch_size=4, micro_batches=2, optimizer="sgd", momentum=0.0)
    step = step_of(job)
    assert (step["batch_size"], step["micro_batches"], step["sequence"]) == (4, 2, 16)
    assert step["dtype"] == "float32" and not step["optimizer"].kinds
