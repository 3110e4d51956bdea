"""The shards of a model, for compositions and engines; and their placement on the nodes of a machine."""

import json

import numpy as np
import pytest

from spmd_engine.cli import main
from spmd_engine.engine.distributed import make_engine
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import gpt
from spmd_engine.planning.dry_run.analyze import Samples, analyze, analyze_engine
from spmd_engine.planning.dry_run.model_shards import model_shards
from spmd_engine.planning.machine.machine import parse_machine, toml_of
from spmd_engine.planning.search.placement import annealed, tasks_of
from spmd_engine.strategies import STRATEGIES, default_axes, strategy_named
from spmd_engine.strategies.two_convolutions import IMAGE
from support import tiny
from support.linear_engine import Linear
from support.pairwise import in_turn
from support.placements import exact

GPT = gpt(tiny.SIZE)
COMPOSITIONS = [
    ({"data": 2}, ParallelConfig(zero=3)),
    ({"data": 2, "model": 2}, ParallelConfig(sequence_parallel=True)),
    ({"data": 2, "pipe": 2}, ParallelConfig()),
    ({"pipe": 2, "data": 2}, ParallelConfig(schedule="interleaved", chunks=2, zero=1)),
    ({"pipe": 3}, ParallelConfig()),
]
UNEQUAL = parse_machine("""
name = "unequal"
between = {latency = 1e-4, bandwidth = 1e8, lanes = 1}
[[nodes]]
name = "box"
ranks = 2
memory = "4GiB"
memory_bandwidth = 2e10
cores = 2
speeds = {float32 = [[1e6, 1e9], [1e9, 5e9]]}
inside = {latency = 1e-5, bandwidth = 5e9}
[[nodes]]
name = "board"
count = 2
ranks = 1
memory = "1GiB"
memory_bandwidth = 2e10
kind = "edge"
speeds = {float32 = 1e9}
inside = {latency = 1e-5, bandwidth = 5e9}
""")


@pytest.mark.parametrize("axes, composition", COMPOSITIONS, ids=str)
def test_shards_have_all_that_the_step_has(axes, composition):
    analysis = analyze(GPT, axes, composition, batch_size=8, micro_batches=2)
    shards = model_shards(analysis)
    assert len({shard.id for shard in shards}) == len(shards)
    assert sum(shard.flops for shard in shards) == analysis.flops
    assert sum(point.bytes for shard in shards for point in shard.communication) == pytest.approx(analysis.bytes_sent)
    layers = [name for name, _ in GPT.layers]
    for rank in range(analysis.ranks):
        step, mine = analysis.of_rank(rank), [shard for shard in shards if shard.rank == rank]
        assert {each.name for shard in mine for each in shard.parameters} == {each.name for each in step.shards}
        assert sum(shard.activations for shard in mine) == sum(step.saved.get(layer, 0) for layer in layers)
    assert {layer for shard in shards for layer in shard.layers} == set(layers)
    of_pipeline = {shard.id: shard for shard in shards}
    for shard in shards:
        for before in shard.depends_on:
            last = of_pipeline[before].layers[-1]
            assert layers.index(shard.layers[0]) == layers.index(last) + 1
            sent = [point for point in of_pipeline[before].communication if point.label == "input"]
            assert [shard.id in point.shards for point in sent] == [True]
    first = sum(not shard.depends_on for shard in shards)
    assert first == analysis.ranks // axes.get("pipe", 1)


def test_kinds():
    kinds = []
    for axes, composition in COMPOSITIONS:
        shards = model_shards(analyze(GPT, axes, composition, batch_size=8, micro_batches=2))
        kinds.append({shard.kind for shard in shards})
    assert kinds == [{"state"}, {"tensors"}, {"layers"}, {"layers, state"}, {"layers"}]
    alone = model_shards(analyze(GPT, {"data": 1}, batch_size=8), ["first"])
    assert [(shard.kind, shard.node, shard.communication) for shard in alone] == [("replica", "first", ())]


@in_turn(2, 1, name=list(STRATEGIES))
def test_a_strategy_has_shards(name):
    page = strategy_named(name)
    axes = default_axes(page, 4)
    sizes = {"s": 8, "d": 6, "h": IMAGE[0], "w": IMAGE[1], "c": 6}
    shape = tuple(sizes[letter] for letter in page.sample.split()[1:])

    def make(mesh):
        return page(6, 2 if "heads" in page.sizes else 10, mesh, np.float64)

    analysis = analyze_engine(make, axes, Samples(shape, shape, 8, 2, np.float64))
    shards = model_shards(analysis)
    assert {shard.rank for shard in shards} == set(range(analysis.ranks))
    assert sum(shard.flops for shard in shards) == analysis.flops
    assert sum(point.bytes for shard in shards for point in shard.communication) == pytest.approx(analysis.bytes_sent)
    assert all(shard.parameters and shard.bytes for shard in shards if shard.rank == 0)


def test_an_engine_of_a_user_has_shards():
    def make(mesh):
        engine = make_engine(Linear, mesh)
        engine.load_checkpoint({"w": np.zeros((5, 3), np.float32)})
        return engine

    shards = model_shards(analyze_engine(make, {"data": 2}, Samples((5,), (3,), 8)))
    (first, second), (w,) = shards, shards[0].parameters
    assert (w.name, w.shape, w.whole_shape, w.bytes) == ("w", (5, 3), (5, 3), 60)
    assert first.bytes == 60 * 4  # with the gradient, and two arrays of AdamW
    assert first.communication[0].shards == (second.id,) == ("1",)


def test_the_capabilities_of_nodes():
    box, board, other = UNEQUAL.capabilities()
    assert (box.kind, box.ranks, box.compute, box.memory, box.bandwidth) == ("cloud", 2, 1e10, 4 << 30, 1e8)
    assert (board.kind, board.ranks, board.compute, board.memory) == ("edge", 1, 1e9, 1 << 30)
    assert (board.node, other.node, other.name) == (1, 2, "board")
    with pytest.raises(UsageError, match="no speed for float64"):
        UNEQUAL.capabilities("float64")


def test_shards_are_placed_as_well_as_possible():
    analysis = analyze(GPT, {"data": 2, "pipe": 2}, ParallelConfig(), batch_size=64, micro_batches=2)
    tasks = tasks_of(model_shards(analysis), UNEQUAL.capabilities())
    places = annealed(tasks)
    assert tasks.cost(places) == pytest.approx(tasks.cost(exact(tasks)))
    assert np.bincount(places).tolist() == [2, 1, 1]


def test_the_command_lists_and_places_shards(capsys, tmp_path):
    (tmp_path / "nodes.toml").write_text(toml_of(UNEQUAL))
    command = ["analyze", "--model", "gpt-nano", "--mesh", "data=2,pipe=2", "--batch-size", "4"]
    main([*command, "--shards", "--machine", str(tmp_path / "nodes.toml")])
    page = capsys.readouterr().out
    assert "3:1    layers   block4/attention to head (10)" in page
    assert "node 0: box (cloud), 2 ranks, 10 GFLOP/s, 4.00 GiB, 95.37 MiB/s to other nodes" in page
    main([*command, "--shards", "--json"])
    content = json.loads(capsys.readouterr().out)
    assert [shard["id"] for shard in content["shards"]] == ["0:0", "1:1", "2:0", "3:1"] and not content["nodes"]
    with pytest.raises(SystemExit):
        main([*command, "--machine", "cpu"])
    assert "add --shards" in capsys.readouterr().err
