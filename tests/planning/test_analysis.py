"""What an analysis tells beside bytes and calls: FLOPs, memory, shards, the critical path; and its command."""

import json
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from spmd_engine import Mesh
from spmd_engine.cli import main
from spmd_engine.engine import AdamW
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import Mixture, gpt
from spmd_engine.models.mlp import deep_mlp
from spmd_engine.models.names import build_model
from spmd_engine.planning import analyze
from spmd_engine.training import Trainer
from support import tiny
from support.real_steps import build, real_batch
from support.script_module import script

SIZES = {"batch_size": 8, "micro_batches": 2}
GPT = gpt(replace(tiny.SIZE, layers=2))


def test_flops_of_linear_layers_are_three_times_two_for_each_weight_and_sample():
    analysis = analyze(deep_mlp(4, 16), {"data": 2}, **SIZES)
    weights, biases = 4 * 16 * 16, 4 * 16  # of which gradients are sums, made by BLAS
    assert analysis.flops == (6 * weights + 2 * biases) * 8
    assert analysis.of_rank(0).flops * 2 == analysis.flops


def test_ranks_with_different_parts_of_a_sequence_are_in_different_classes():
    sizes = {"sequence": 7, **SIZES}  # over three ranks: 3, 2 and 2 positions
    parallel = ParallelConfig(sequence_parallel=True)
    found, every = (analyze(GPT, {"model": 3}, parallel, every=each, **sizes) for each in (False, True))
    assert found.totals() == every.totals()
    assert found.peak_bytes_by_rank() == every.peak_bytes_by_rank()


def test_ranks_whose_neighbours_differ_are_in_different_classes():
    """The first rank has no position before its own, so it receives no halo, and the last one sends none."""
    model = script("own_layer", "examples").model(width=8, blocks=1)
    parallel = ParallelConfig(sequence_parallel=True)
    found, every = (analyze(model, {"model": 4}, parallel, every=each, **SIZES) for each in (False, True))
    assert found.totals() == every.totals()
    assert found.peak_bytes_by_rank() == every.peak_bytes_by_rank()


def test_ranks_with_different_channels_are_in_different_classes():
    """In a bottleneck each sends channels to each other: who stood for all would get what it sends to itself."""
    model = build_model("resnet50")
    found, every = (analyze(model, {"model": 2}, batch_size=1, every=each) for each in (False, True))
    assert found.totals() == every.totals()


@pytest.mark.parametrize(("axes", "classes"), [({"data": 4}, 1), ({"data": 2, "columns": 2}, 2)], ids=str)
def test_ranks_with_different_images_are_in_one_class(axes, classes):
    model, how = build_model("convnet"), {"batch_size": 8, "micro_batches": 2}
    found, every = (analyze(model, axes, every=each, **how) for each in (False, True))
    assert len(found.classes) == classes and found.totals() == every.totals()
    assert found.peak_bytes_by_rank() == every.peak_bytes_by_rank()


@pytest.mark.parametrize("recompute, forwards", [("none", 1), ("block", 2)])
def test_recomputation_is_a_second_forward(recompute, forwards):
    plain = analyze(GPT, {"data": 1}, **SIZES).of_rank(0)
    step = analyze(GPT, {"data": 1}, ParallelConfig(recompute=recompute), **SIZES).of_rank(0)
    of_blocks = {n: sum(c.flops for c in plain.computations if c.name == f"block0/mlp {n}") for n in ("forward",)}
    again = sum(c.flops for c in step.computations if c.name == "block0/mlp forward again")
    assert again == (forwards - 1) * of_blocks["forward"]


@pytest.mark.parametrize(
    "model, recompute, dtype",
    [
        (deep_mlp(6, 256), "none", np.float32),
        (deep_mlp(6, 256), "block", np.float32),
        (build_model("resnet-nano"), "none", np.float64),  # blocks of many layers; no compiled loops of this dtype
    ],
    ids=["mlp", "recomputed", "resnet"],
)
def test_peak_memory_is_what_numpy_takes(model, recompute, dtype):
    composition = ParallelConfig(recompute=recompute)
    predicted = analyze(model, {"data": 1}, composition, batch_size=512, micro_batches=2, dtype=dtype).peak_bytes
    with Mesh() as mesh:
        tracemalloc.start()
        engine = build(model, mesh, composition, dtype)
        batch = real_batch(model, engine, 512, 2)
        trainer = Trainer(engine, AdamW(), lambda step: batch, lambda step: 1e-3)
        trainer.step()
        tracemalloc.reset_peak()
        trainer.step()
        measured = tracemalloc.get_traced_memory()[1]
        arrays = tracemalloc.DomainFilter(False, np.lib.tracemalloc_domain)
        measured -= sum(each.size for each in tracemalloc.take_snapshot().filter_traces([arrays]).traces)
        tracemalloc.stop()
    flat = [array for each in engine.store.storages for array in (each.whole_parameters, each.whole_gradients)]
    measured += sum(array.nbytes for array in flat if not array.flags.owndata)  # mapped
    assert predicted == pytest.approx(measured, rel=0.02)


def test_messages_that_arrive_early_are_in_the_peak():
    """The last stage has asked for the next micro-batch before the backward, and the stage before is one ahead."""
    step = analyze(deep_mlp(4, 64), {"pipe": 2}, batch_size=64, micro_batches=4).of_rank(1)
    early = sum(size for _, what, size in step.peak.holds if what == "from other stages, ahead of time")
    assert early == 16 * 64 * 4
    assert step.peak.bytes == max(moment.total for moment in step.timeline)


def test_an_all_gather_along_a_later_dim_needs_a_second_copy():
    """First as it comes, then in its place. A head gathers [512 7 12] along the second axis."""
    parallel = ParallelConfig(sequence_parallel=True)
    step = analyze(GPT, {"model": 2}, parallel, batch_size=512, sequence=7).of_rank(0)
    apart = analyze(GPT, {"model": 2}, batch_size=512, sequence=7).of_rank(0)
    gathered = 512 * 7 * 12 * 4
    assert step.temporaries["head forward"] >= apart.temporaries["head forward"] + gathered


def test_equal_layers_are_run_once_and_counted_each_time():
    one, six = (analyze(deep_mlp(n, 16), {"data": 1}, **SIZES).of_rank(0) for n in (2, 12))
    assert six.flops == 6 * one.flops
    assert six.saved["block5/pair"] == one.saved["block0/pair"] > 0


def test_ranks_without_experts_execute_passes_when_the_others_do():
    """They communicate inside layers, but gradients of other parameters exist from the first micro-batch on."""
    model = gpt(replace(tiny.SIZE, mixture=Mixture(3)))
    one, two = (
        analyze(model, {"expert": 4}, ParallelConfig(zero=2), batch_size=4 * count, micro_batches=count)
        for count in (1, 2)
    )

    def rows_sent(analysis, rank):
        lines = analysis.of_rank(rank).ledger().items()
        return sum(calls for (operation, _, _), (calls, _, _) in lines if operation == "all_to_all")

    assert [rows_sent(two, rank) for rank in range(4)] == [2 * rows_sent(one, rank) for rank in range(4)]
    assert rows_sent(one, 3) > 0


def test_shards_describe_the_parameters_of_a_rank():
    step = analyze(GPT, {"data": 2, "model": 2}, ParallelConfig(zero=3), **SIZES).of_rank(0)
    (table,) = (shard for shard in step.shards if shard.name == "embedding/table")
    assert (table.sharding, table.shape, table.whole_shape) == ("v/model d", (7, 12), (13, 12))
    assert table.layers == ("embedding", "head")
    assert table.bytes == table.requires["gathered"] == 7 * 12 * 4
    assert table.depends_on == ("data",)
    stored, whole = (sum(getattr(each, name) for each in step.shards) for name in ("stored_bytes", "bytes"))
    assert stored == step.before["parameters"] == pytest.approx(whole / 2, rel=0.05)


def test_a_pipeline_waits_along_its_critical_path():
    alone = analyze(GPT, {"data": 1}, **SIZES).critical_path()
    step = analyze(GPT, {"pipe": 3}, ParallelConfig(zero=0), **SIZES)
    path = step.critical_path()
    assert path.classes[0] == 0 and set(path.classes) == {0, 1, 2}
    assert max(each.step.flops for each in step.classes) < path.flops < alone.flops


def test_ranks_with_equal_steps_are_one_class():
    analysis = analyze(ModelConfig("mlp"), {"data": 64, "row": 2}, batch_size=128)
    assert sorted(rank for each in analysis.classes for rank in each.ranks) == list(range(128))
    assert len(analysis.classes) <= 2


def test_analyze_prints_a_page_and_json(capsys):
    command = ["analyze", "--model", "mlp", "--mesh", "pipe=2", "--micro-batches", "2"]
    main(command)
    page = capsys.readouterr().out
    for words in ("critical path", "layer_0", "at its peak", "memory of rank", "(P) parameters"):
        assert words in page
    main([*command, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["bytes_sent"] == sum(each["bytes"] for each in said["totals"])
    assert len(said["peak_bytes"]) == 2


def test_a_missing_rank_is_an_error_of_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        main(["analyze", "--mesh", "data=2", "--rank", "2"])
    assert end.value.code == 2
    assert "ranks 0 to 1" in capsys.readouterr().err


def test_a_received_gradient_is_added_where_it_is_waited_for():
    """When the weights have theirs: not in a pass of its own, until which the stream's gradient would be kept."""
    passes = [(each.layer, each.phase) for each in analyze(GPT, {"model": 2}, **SIZES).of_rank(0).computations]
    assert ("block0/mlp", "backward (weights)") in passes
    for (layer, phase), following in pairwise(passes):
        assert phase != "backward (weights)" or following != (layer, "backward (input)")


def test_constants_of_convolution_kernels_count_once(monkeypatch):
    """Where they read and write: a table of each convolution, way and size, which all micro-batches use."""
    pytest.importorskip("numba")
    fast_places = pytest.importorskip("spmd_engine.arrays.numba.places")
    found = {}

    def analysis(batch_size, micro_batches=1):
        sizes = {"batch_size": batch_size, "micro_batches": micro_batches, "dtype": np.float32}
        return analyze(build_model("convnet"), {"data": 1}, **sizes)

    assert analysis(4).of_rank(0).constants == 0  # loops are switched off
    monkeypatch.setenv("SPMD_FAST", "1")

    def watched(name, find):
        def run(*args):
            places = find(*args)
            arrays = {id(each): each for each in places if isinstance(each, np.ndarray)}
            found[name, args] = sum(each.nbytes for each in arrays.values())
            return places

        return run

    for name in ("places_of_outputs", "places_of_taps"):
        monkeypatch.setattr(fast_places, name, watched(name, vars(fast_places)[name]))
    once = analysis(4)
    assert once.of_rank(0).constants == sum(found.values()) > 0
    assert once.peak_bytes == once.of_rank(0).peak.bytes + once.of_rank(0).constants
    assert analysis(8, 2).of_rank(0).constants == once.of_rank(0).constants


TOML = "layers = 2\nwidth = 32\nheads = 2\ncontext = 16\n"


#: The model by name is that of the largest; each command takes it in the same place as it takes the file.
COMMANDS = {
    "inspect": ["inspect"],
    "analyze": ["analyze", "--batch-size", "2", "--sequence", "8"],
    "show": ["show", "communication", "--batch-size", "2"],
}


@pytest.mark.parametrize(
    ("command", "model"),
    [
        pytest.param(command, model, id=f"{name}-{model}", marks=[pytest.mark.soak] * later)
        for name, command in COMMANDS.items()
        for model, later in (("small.toml", False), ("gpt2-xl", name != "analyze"))
    ],
)
def test_analyze_takes_the_models_of_plan(command, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(TOML)
    main([*command, "--model", model, "--mesh", "data=2"])
    assert model.removesuffix(".toml") in capsys.readouterr().out


def test_parameters_beyond_the_memory_of_a_node_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr("spmd_engine.engine.zero.parameter_store.memory_here", lambda: 1000)
    with pytest.raises(UsageError, match=r"its parameters alone are .* KiB, and this node has 1000 B of mem"):
        build(deep_mlp(4, 16), Mesh(), ParallelConfig(), np.float32)


def peak(dtype):
    step = analyze(ModelConfig(name="gpt-nano"), {"data": 1}, batch_size=16, sequence=64, dtype=dtype).of_rank(0)
    return step.peak


def test_the_dry_run_keeps_half_of_the_activations():
    wide, half = (peak(dtype).bytes_by_kind for dtype in ("float32", "bfloat16"))
    assert half["activations"] <= 0.52 * wide["activations"]
    assert half["gradients"] == wide["gradients"] and half["optimizer state"] == wide["optimizer state"]
    assert half["parameters"] == 1.5 * wide["parameters"]  # masters besides
