"""Bytes per rank: against the formulas of ZeRO, against what an engine stores, and as drawn."""

from pathlib import Path

import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints.pretrained import with_shape
from spmd_engine.cli import main
from spmd_engine.engine import SGD
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models import build_model, deep_mlp, gpt
from spmd_engine.models.lora import LoRAOptions
from spmd_engine.observability.memory import CLASSES, bytes_per_rank, draw_memory
from spmd_engine.planning import analyze
from spmd_engine.training import TrainConfig
from support.pairwise import in_turn
from support.tiny import SIZE

FOLDERS = Path(__file__).parents[1] / "golden" / "decoders"
FLOAT32, ADAMW = 4, 2
MODEL = build_model("gpt-nano")
COUNT = MODEL.parameter_count


def held(axes, zero, model=MODEL, dtype="float32", optimizer=None, **how):
    ranks = bytes_per_rank(model, axes, ParallelConfig(zero=zero, **how), dtype=dtype, optimizer=optimizer)
    assert all(tuple(name for name, _ in rank) == CLASSES for rank in ranks)
    return [[count for _, count in rank] for rank in ranks]


def sums(ranks):
    return [sum(column) for column in zip(*ranks)]


def test_one_rank_holds_16_bytes_a_parameter():
    for zero in range(4):
        assert held({"data": 1}, zero)[0][:3] == [4 * COUNT, 4 * COUNT, 8 * COUNT]


def test_the_stages_of_zero():
    n = 3
    assert sums(held({"data": n}, 0)) == [n * 4 * COUNT, n * 4 * COUNT, n * 8 * COUNT, 0]
    assert sums(held({"data": n}, 1)) == [n * 4 * COUNT, n * 4 * COUNT, 8 * COUNT, 0]
    assert sums(held({"data": n}, 2))[:3] == [n * 4 * COUNT, 4 * COUNT, 8 * COUNT]
    assert sums(held({"data": n}, 3))[:3] == [4 * COUNT, 4 * COUNT, 8 * COUNT]
    for rank in held({"data": n}, 3):  # as even as rows allow
        assert rank[0] == pytest.approx(4 * COUNT / n, rel=0.01)


def test_parts_over_the_sequence_and_replicas():
    assert sums(held({"data": 2, "context": 2}, 3))[0] == 4 * COUNT
    assert sums(held({"replicate": 2, "shard": 2}, 3))[0] == 2 * 4 * COUNT
    assert sums(held({"data": 2, "shard": 2}, None))[0] == 2 * 4 * COUNT  # data alone keeps replicas


def test_tensor_parallel_and_pipeline():
    whole = {name: shape for name, (_, shape) in MODEL.parameters()}
    cut = sum(held({"model": 2}, 0)[rank][0] for rank in range(2)) / 4
    assert COUNT < cut < 1.1 * COUNT  # only norms and some biases are on both
    table = whole["embedding/table"][0] * whole["embedding/table"][1]
    assert sums(held({"pipe": 4}, 0))[0] == 4 * (COUNT + table)  # the first and the last stage use the tied one
    assert sums(held({"pipe": 2, "data": 2}, 3))[0] == 4 * (COUNT + table)


def test_other_dtypes_and_optimizers():
    assert held({"data": 2}, 0, dtype="float64", optimizer=SGD(momentum=0.9))[1] == [8 * COUNT] * 3 + [0]


MESHES = [{"data": 3}, {"data": 2, "model": 2}, {"pipe": 2, "data": 2}, {"shard": 2, "data": 2}]


@in_turn(2, axes=MESHES, zero=[None, 0, 1, 2, 3])
def test_what_is_drawn_is_what_an_engine_stores(axes, zero):
    model, composition = gpt(SIZE), ParallelConfig(zero=zero, group_threshold=500)

    def program():
        with Mesh(**axes) as mesh:
            storage = composition.storage
            engine = LayeredEngine(model, mesh, storage=storage)
            stored = sum(array.nbytes for array in engine.parameters.values())
            return stored, sum(array.nbytes for array in engine.owned.values()), storage.stage(mesh.axes)

    drawn = bytes_per_rank(model, axes, composition)
    for ours, (stored, owned, stage) in zip(drawn, run_threads(program, len(drawn)), strict=True):
        assert dict(ours)["parameters"] == stored
        assert dict(ours)["optimizer state"] == ADAMW * (owned if stage else stored)


WEIGHTS, BIASES = 64 * 64 * FLOAT32, 64 * FLOAT32  # of deep_mlp: two of each are a layer, and each is a group
LAYER = 2 * (WEIGHTS + BIASES)
#: Gradients of a layer, and the last two groups of the one behind it, which are on their way to their owners.
GRADIENTS = LAYER + WEIGHTS + BIASES


@pytest.mark.parametrize(
    ("axes", "zero", "whole"),
    [
        ({"data": 2}, 1, 0),
        ({"data": 2}, 2, GRADIENTS),
        ({"data": 2}, 3, GRADIENTS + 2 * LAYER),  # parameters of the layer, and of the next one
        ({"pipe": 3, "data": 2}, 3, GRADIENTS + 2 * LAYER),
        ({"replicate": 2, "shard": 2}, None, GRADIENTS + 2 * LAYER),
        ({"data": 1}, 3, 0),
    ],
    ids=str,
)
def test_unsharded_groups(axes, zero, whole):
    assert {rank[3] for rank in held(axes, zero, deep_mlp(18, 64), group_threshold=0)} == {whole}


def test_unsharded_groups_are_those_of_the_analysis_of_any_batch():
    composition = ParallelConfig(zero=3, group_threshold=500)
    analysis = analyze(MODEL, {"data": 3}, composition, batch_size=13, micro_batches=3)
    for rank, mine in enumerate(held({"data": 3}, 3, group_threshold=500)):
        moments = [each.bytes_by_kind for each in analysis.of_rank(rank).timeline]
        assert mine[3] == max(each.get("gathered groups", 0) + each.get("whole gradients", 0) for each in moments)


# --- drawn

NUMBERS = [
    "zero 0         472,572        472,572              945,144                   0  1,890,288",
    "zero 1         472,572        472,572              236,544                   0  1,181,688",
]


def picture_of_inspect(capsys, *options):
    main(["inspect", *options])
    lines = capsys.readouterr().out.splitlines()
    return lines[next(number for number, line in enumerate(lines) if ": bytes on " in line) :]


def test_the_former_command_prints_the_same_and_names_the_new_one(here):
    options = ["--model", "mlp", "--mesh", "data=4", "--zero", "1"]
    assert here("show", "memory", *options)[:2] == here("inspect", *options)[:2]
    note = "spmd_engine: note: 'show memory' is now 'inspect'; the next release has that name alone\n"
    assert here("show", "memory", *options)[2] == note


def test_bars_and_numbers(capsys):
    lines = picture_of_inspect(capsys, "--model", "mlp", "--mesh", "data=4")
    assert lines[0] == "mlp, 118,143 parameters in float32, adamw, mesh data=4: bytes on the rank that holds most"
    assert lines[3] == "zero 0 │   parameters    │    gradients    │          optimizer state          │ 1.80 MiB"
    assert lines[6].startswith("zero 1 │   parameters    │    gradients    │   o    │ 1.13 MiB")
    assert set(NUMBERS) < set(lines)


def test_the_table_of_arrays_has_the_bytes_that_are_drawn(capsys):
    options = ["--model", "mlp", "--mesh", "data=4", "--zero", "1"]
    main(["inspect", *options, "--storage"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mlp, 118,143 parameters in float32, adamw, mesh data=4, zero 1: where arrays live"
    rows = {line[:27].strip(): line[27:].split() for line in lines if "float32  " in line}
    assert rows["parameter in use"] == ["the", "whole", "float32", "memory", "472,572", "472,572"]
    assert rows["optimizer state (2 kinds)"][-1] == "236,544"  # as drawn for ZeRO 1
    assert rows["master"][-4:] == ["part", "that", "is", "sent"] and rows["gradient"][-1] == "472,572"


def test_the_table_of_arrays_has_the_states_of_the_job_and_not_of_the_default(capsys, tmp_path):
    TrainConfig.of(model="mlp", optimizer="sgd", momentum=0.0).write(tmp_path / "job.json")
    main(["inspect", "--config", str(tmp_path / "job.json"), "--mesh", "data=4", "--storage"])
    assert "optimizer state (0 kinds)" in capsys.readouterr().out


def test_bars_are_to_scale():
    job = TrainConfig.of(model="gpt2", mesh={"data": 4})
    picture = draw_memory(job, job.model.build(job.composition), job.composition)
    cells = [cell for cell in picture.drawing if cell.outline]
    widths = [cell.width for cell in cells[:3]]
    assert sum(widths) == 72 and widths == [18, 18, 36]
    totals = {}
    for cell in cells:
        totals[cell.y] = totals.get(cell.y, 0) + cell.width
    assert list(totals) == [0, 3, 6, 9] and totals[3] == pytest.approx(72 * (4 + 4 + 2) / 16, abs=1.5)


def test_one_stage_rank_by_rank(capsys):
    lines = picture_of_inspect(capsys, "--model", "mlp", "--mesh", "replicate=2,shard=2", "--zero", "3")
    assert lines[0].endswith("bytes on each rank, zero 3")
    assert lines[3].startswith("ranks 0,2 ") and lines[6].startswith("ranks 1,3 ")


def test_many_kinds_of_ranks_are_two_bars(capsys):
    lines = picture_of_inspect(capsys, "--mesh", "data=64", "--zero", "3")
    assert sum(line.startswith("rank") and "│" in line for line in lines) == 2
    assert any(line.startswith("Drawn are the ranks that hold most and least; ") for line in lines)


@pytest.mark.parametrize(
    ("axes", "model"),
    [({"data": 4}, "qwen3"), ({"data": 2, "replicate": 2}, "qwen3"), ({"expert": 2, "data": 2}, "qwen3_moe")],
)
def test_frozen_weights_of_a_rank_are_those_that_an_engine_stores(axes, model):
    config = ModelConfig(str(FOLDERS / model), dtype="float64", lora=LoRAOptions(rank=2))
    composition = ParallelConfig(mesh=axes, zero=3)

    def program():
        with Mesh(**axes) as mesh:
            engine = build_engine(with_shape(config, mesh.group()), mesh, composition)
            return sum(x.nbytes for x in engine.buffers.values()), engine.model

    (counts, (model, *_)) = zip(*run_threads(program, 4), strict=True)
    ranks = bytes_per_rank(model, axes, ParallelConfig(zero=3), dtype="float64")
    assert [dict(rank)["frozen weights"] for rank in ranks] == list(counts) and min(counts) > 0
