"""Traces: every rank's layers and waits, on one clock."""

import json

import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.training.trace import Trace
from support import routed, tiny


def traced(axes, nodes=None, **options):
    """The events of one step, of all ranks."""

    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, **options)
            trace = Trace(mesh)
            with trace.of(engine):
                engine.step(tiny.batch(engine, 0, micro_batches=2))
            engine.step(tiny.batch(engine, 1))  # this one is not recorded
            return trace.json()

    results = run_threads(program, tiny.ranks_of(axes), nodes=nodes)
    assert results[1:] == [None] * (len(results) - 1)
    return json.loads(results[0])["traceEvents"]


def spans(events, rank, kind):
    return [event for event in events if event["ph"] == "X" and event["pid"] == rank and event["cat"] == kind]


@pytest.mark.parametrize("nodes", [None, ["one", "one", "two", "two"]], ids=["one node", "two nodes"])
def test_every_rank_shows_its_layers_and_its_waits(nodes):
    events = traced({"data": 2, "model": 2}, nodes)
    for rank in range(4):
        compute = spans(events, rank, "compute")
        names = [event["name"] for event in compute]
        for what in ("forward", "backward (input)", "backward (weights)"):
            assert names.count(f"block1/mlp {what}") == 2  # of two micro-batches
        waits = {event["name"] for event in spans(events, rank, "communication")}
        assert "all_reduce over model (block0/attention)" in waits
        for row in (compute, spans(events, rank, "communication")):
            assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in row)
            ends = [(event["ts"], event["ts"] + event["dur"]) for event in sorted(row, key=lambda e: e["ts"])]
            assert all(end <= start + 0.5 for (_, end), (start, _) in zip(ends, ends[1:], strict=False))
    labels = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert labels == {f"rank {r} (data={r // 2},model={r % 2})" for r in range(4)}


def test_stages_show_their_own_layers():
    events = traced({"pipe": 2})
    first, last = ({event["name"].split()[0] for event in spans(events, rank, "compute")} for rank in (0, 1))
    assert "embedding" in first and "head" in last and not first & last


def test_layers_with_losses_of_their_own_are_recorded_too():
    def program():
        with Mesh(expert=2) as mesh:
            engine = routed.engine_on(mesh, routed.model("all losses"))
            trace = Trace(mesh)
            with trace.of(engine):
                engine.step(tiny.batch(engine, 0))
            return trace.json()

    events = json.loads(run_threads(program, 2)[0])["traceEvents"]
    assert "block0/moe backward (input)" in {event["name"] for event in spans(events, 1, "compute")}


def test_a_step_is_not_watched_for_longer_than_it_was_asked():
    with Mesh() as mesh:
        engine = tiny.make_engine(mesh)
        trace = Trace(mesh)
        with trace.of(engine):
            pass
        engine.step(tiny.batch(engine, 0))
        assert mesh.ledger.observer is None
        assert not spans(json.loads(trace.json())["traceEvents"], 0, "compute")
