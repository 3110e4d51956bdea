"""Offloading in dry runs, simulations and plans."""

import re
from dataclasses import replace

import pytest
from test_simulation import analysis, machine, ms, work

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.offload import file as offload_file
from spmd_engine.engine.offload.file import FileTarget
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import gpt
from spmd_engine.planning import analyze, plan
from spmd_engine.planning.dry_run.step_analysis import Computation, Phases
from spmd_engine.planning.machine.machine import Machine, parse_machine, read_machine, toml_of
from spmd_engine.planning.search import plan_search
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.search_space import Candidate
from spmd_engine.training import Trainer
from support import tiny

SIZES = {"batch_size": tiny.BATCH, "micro_batches": 2}


@pytest.mark.parametrize(
    "how",
    [
        {"zero": 1, "offload": "optimizer"},
        {"zero": 3, "offload": "optimizer"},
        {"mesh": {"pipe": 2}, "offload": "optimizer"},
    ],
)
def test_predicted_transfers_of_the_optimizer_state_are_those_of_the_files(how, tmp_path, monkeypatch):
    """Up to the last page of each array."""
    monkeypatch.setattr(offload_file, "_in_memory", lambda folder: "")
    axes = how.get("mesh", {"data": 2})
    composition = ParallelConfig(**how, offload_dir=str(tmp_path))
    moved = [0, 0]

    def counting(place, move):
        def count(file, offset, view):
            moved[place] += len(view)
            return move(file, offset, view)

        return count

    def program():
        mesh = Mesh(**axes)
        engine = LayeredEngine(gpt(tiny.SIZE), mesh, **composition.how_on(axes))
        optimizer = AdamW()
        trainer = Trainer(engine, optimizer, lambda step: tiny.batch(engine, step), lambda step: 0.1)
        optimizer.prepare(engine)
        trainer.step()
        return sum(2 * -(-x.nbytes // 4096) * 4096 - 2 * x.nbytes for x in engine.owned.values())

    for place, name in enumerate(("read", "write")):
        monkeypatch.setattr(FileTarget, name, counting(place, getattr(FileTarget, name)))
    padding = sum(run_threads(program, 2))
    predicted = analyze(gpt(tiny.SIZE), axes, composition, **SIZES)
    computations = [each for rank in range(2) for each in predicted.of_rank(rank).computations]
    assert moved == [sum(each.loaded for each in computations) + padding] * 2
    assert moved == [sum(each.stored for each in computations) + padding] * 2


def test_a_dry_run_holds_what_is_not_away():
    axes, model = {"data": 2}, gpt(tiny.SIZE)
    steps = {
        kinds: analyze(model, axes, ParallelConfig(offload=kinds), batch_size=8, sequence=10).of_rank(0)
        for kinds in (None, "optimizer", "activations", "parameters")
    }
    assert "parameters" not in steps["parameters"].before
    loaded = sum(each.loaded for each in steps["parameters"].computations)  # one group: for its layers, and its update
    assert loaded == 2 * steps[None].before["parameters"]
    assert steps[None].before["optimizer state"] == 2 * steps[None].before["parameters"]
    assert "optimizer state" not in steps["optimizer"].before
    most = {kinds: max(m.bytes_by_kind.get("activations", 0) for m in step.timeline) for kinds, step in steps.items()}
    assert most["activations"] < 0.7 * most[None] and most["optimizer"] == most[None]
    stored = sum(each.stored for each in steps["activations"].computations)
    assert 0.4 * sum(steps[None].saved.values()) < stored <= sum(steps[None].saved.values())


def test_a_record_of_a_parameter_has_its_bytes_in_memory():
    def total(kinds):
        composition = ParallelConfig(zero=3, offload=kinds)
        shards = analyze(gpt(tiny.SIZE), {"data": 2}, composition, batch_size=8, sequence=10).of_rank(0).shards
        states, gathered = (sum(each.requires[kind] for each in shards) for kind in ("optimizer_state", "gathered"))
        return [sum(each.stored_bytes for each in shards), sum(each.owned_bytes for each in shards), states, gathered]

    stored, owned, states, gathered = total(None)
    assert stored == owned == states / 2 == pytest.approx(gathered / 2, rel=0.1)
    assert total("optimizer,parameters") == [0, owned, 0, gathered]


@pytest.mark.parametrize(
    ("name", "how", "why"),
    [
        ("a100", {"offload": "activations"}, "--offload activations: those of a device stay there"),
        ("a100", {"offload": "optimizer,parameters"}, "--offload parameters: those of a device stay there"),
        ("cpu", {"offload": "optimizer", "offload_to": "host"}, "--offload-to host: without a device"),
    ],
)
@pytest.mark.parametrize("mesh", [None, {"data": 2}], ids=["searched", "given"])
def test_what_the_engine_does_not_offload_is_not_planned(name, how, why, mesh):
    with pytest.raises(UsageError, match=why):
        plan("gpt-nano", ranks=2, mesh=mesh, machine=name, base=ParallelConfig(**how), seconds=1)


def test_offloading_is_planned_where_it_is_faster_than_recomputation(quick_disk, monkeypatch):
    """And the searches with and without it share the limit."""
    given, search = [], plan_search.search

    def counted(model, space, limits, goal, budget, **options):
        given.append((space.offload == (None,), budget.left))
        return search(model, space, limits, goal, budget, **options)

    monkeypatch.setattr(plan_search, "search", counted)
    monkeypatch.setattr(plan_search, "EVALUATIONS", 4000)
    limits = {"memory": "130MiB", "axes": ["data"], "fixed": {"micro_batches": 4}}
    result = plan("gpt-mini", ranks=2, machine=quick_disk, batch_size=8, **limits)
    assert result.plan.candidate.recompute == "none" and result.composition.offload
    assert result.reasons[0].startswith("zero")
    (first, *_), (second, *_) = ([left for alone, left in given if alone == is_first] for is_first in (True, False))
    whole = plan_search.EVALUATIONS
    assert first == 0.75 * whole and whole / 4 < second < whole  # what the first does not use is left to the second


def moves(loaded=0, stored=0, phase=Phases.OTHER):
    return Computation("moves", "", phase, loaded=loaded, stored=stored)


@pytest.mark.parametrize(
    ("steps", "milliseconds"),
    [
        ([[work("a", 5), moves(500_000, 500_000, Phases.UPDATE)]], 5 + 1 + 2),  # 500 MB/s read, 250 MB/s written
        ([[moves(500_000, 500_000, Phases.UPDATE)]] * 2, 2 * 3),  # two ranks, one disk
        ([[moves(stored=1_000_000), work("a", 1), moves(stored=1_000_000)]], 4),  # the second waits for the first
        ([[moves(stored=1_000_000), work("a", 6), moves(stored=1_000_000)]], 6),  # written behind
        ([[moves(loaded=500_000), work("a", 5), moves(loaded=500_000), work("b", 2)]], 1 + 5 + 2),  # read ahead
        ([[moves(loaded=500_000), work("a", 5), moves(loaded=4_000_000), work("b", 2)]], 1 + 8 + 2),  # and not in time
        # as many ranks as cores: what threads copy, at 1 GB/s, is added to the work of the rank
        ([[moves(stored=1_000_000), work("a", 9), moves(stored=1_000_000)], [work("b", 1)]], 1 + 9 + 1),
        ([[moves(loaded=2_000_000), work("a", 5)], [work("b", 1)]], 4 + 2 + 5),
    ],
)
def test_ranks_wait_for_their_disk(steps, milliseconds):
    from spmd_engine.planning.simulator.simulation import simulate

    two_cores = machine(cores=2)
    two_cores = replace(two_cores, nodes=tuple(replace(node, disk_copy=1e9) for node in two_cores.nodes))
    assert ms(simulate(analysis(*((step, []) for step in steps)), two_cores)) == milliseconds


def test_a_machine_file_has_the_speeds_of_disks():
    here = read_machine("cpu")
    text = toml_of(here).replace("cores = 2\n", "cores = 2\ndisk_read = 2e+09\n")
    node = parse_machine(text).nodes[0]
    assert (node.disk_read, node.disk_write) == (2e9, 2.5e8)
    assert node.disk_seconds(4e9, 5e8) == 4


@pytest.fixture(scope="module")
def quick_disk() -> Machine:
    return parse_machine(
        toml_of(read_machine("cpu")).replace("cores = 2\n", "cores = 2\ndisk_read = 3e9\ndisk_write = 3e9\n")
    )


def test_offloading_is_planned_where_nothing_else_fits(quick_disk, monkeypatch):
    monkeypatch.setattr(plan_search, "EVALUATIONS", 4000)
    options = {"machine": quick_disk, "batch_size": 8}
    limits = {"memory": "100MiB", "axes": ["data"], "fixed": {"micro_batches": 4, "zero": 1}}
    result = plan("gpt-mini", ranks=2, **limits, **options)
    assert result.reasons[0] == f"offload {result.composition.offload}: nothing fits without"
    assert f"--offload {result.composition.offload}" in result.command
    assert result.evaluation.analysis.peak_bytes <= 100 << 20
    given = plan("gpt-mini", mesh={"data": 2}, memory="260MiB", **options)
    assert re.search(r"mesh data=2 cannot be kept together; .* would suffice with --offload optimizer$", given.why_not)
    assert plan("gpt-mini", ranks=2, base=ParallelConfig(offload="none"), **limits, **options).plan is None
    refused = plan("gpt-mini", mesh={"data": 2}, base=ParallelConfig(zero=1), memory="20MiB", **options)
    assert re.search(r"mesh data=2 cannot be kept together; it needs [\d.]+ MiB", refused.why_not)  # no parameters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_estimated_update_reads_and_writes_float32(dtype):
    slow = {"disk_read": 1e6, "disk_write": 1e6}
    machine = read_machine("cpu").with_ranks(1)
    machine = replace(machine, nodes=(replace(machine.nodes[0], **slow),))
    candidate = Candidate((("data", 1),), 8, micro_batches=1, offload="optimizer,parameters")
    estimator = CostModel(gpt(tiny.SIZE), machine, dtype=dtype).estimator(candidate)
    assert estimator._update_seconds(1e6) == 3 * (4 + 4)
