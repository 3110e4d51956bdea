"""Helper ranks compute layers of other ranks' stages: results, messages and mistakes."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from spmd_engine import run_threads
from spmd_engine.comm.mesh import Mesh, mesh_beside
from spmd_engine.comm.world import world
from spmd_engine.engine import SGD
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.helpers import PartedPasses, parse_assign, passes_of
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.schedules.schedule import Backward, Compute, Forward, MoveGradients, Schedule, check_programs
from spmd_engine.errors import MeshError, UsageError
from spmd_engine.models.decoder import GPT_SIZES
from spmd_engine.models.lora import LoRAOptions
from spmd_engine.models.names import build_model
from spmd_engine.training import Trainer
from support.helped import calls_and_bytes, on_mesh_and_helpers
from support.real_steps import real_batch

STEPS, BATCH, LENGTH = 2, 9, 8
GPT, EXPERTS, IMAGES = (
    ModelConfig("gpt-nano", dropout=0.1, dtype="float64"),
    ModelConfig("gpt-moe-nano", dtype="float64"),
    ModelConfig("resnet-nano", dtype="float64"),  # with batch norm
)
ADAPTERS = ModelConfig("llama-nano", dtype="float64", lora=LoRAOptions(rank=2))


def trained(engine, micro_batches, grad_clip=1.0):
    """Losses, norms, side outputs, a validation loss, and all arrays after some steps."""
    batches = lambda step: real_batch(engine.model, engine, BATCH, micro_batches, step, LENGTH)
    trainer = Trainer(engine, SGD(0.9), batches, lambda step: 0.05, grad_clip=grad_clip)
    reports = list(trainer.run(STEPS))
    numbers = {f"loss {r.step}": r.loss for r in reports} | {f"norm {r.step}": r.grad_norm for r in reports}
    numbers |= {f"{name} {r.step}": value for r in reports for name, value in (r.side_outputs or {}).items()}
    numbers["validation"] = trainer.evaluate([batches(STEPS)])
    arrays = {name: engine.gather(name) for name in engine.names[::5]}
    if not engine.storages[0].table.stored.axes:  # else they are sharded with the parameters
        arrays |= {name: np.array(x) for name, x in engine.buffers.items()}
    return {name: np.asarray(value) for name, value in (numbers | arrays).items()}


CASES = [
    (GPT, {"data": 1}, "block1-2:rank1", {}),
    (GPT, {"data": 2}, "block1-2:rank1", {"zero": 1}),
    (GPT, {"data": 2}, "block0:rank2,block5-7:rank3", {"zero": 3, "recompute": "block", "rank_order": "1,0"}),
    (GPT, {"data": 2}, "embedding:rank2,head:rank1", {"zero": 2, "group_threshold": 0}),
    (GPT, {"pipe": 2}, "block0:rank2", {"recompute": "attention"}),
    (GPT, {"pipe": 2}, "block5-6:rank1", {"schedule": "zero-bubble"}),
    (GPT, {"pipe": 2, "data": 2}, "block0:rank1,block6-7:rank2", {"schedule": "zero-bubble", "zero": 2}),
    (GPT, {"pipe": 2}, "block2-3:rank2", {"schedule": "interleaved"}),  # it serves both stages, as the next two do
    (GPT, {"pipe": 2, "data": 2}, "block2-5:rank1,head:rank1", {"zero": 3}),
    (GPT, {"pipe": 2}, "embedding:rank2,block3-4:rank2,block5:rank1", {"schedule": "zero-bubble"}),
    (GPT, {"data": 2, "pipe": 2}, "block2-3:rank4", {"schedule": "interleaved", "zero": 1}),
    (GPT, {"pipe": 2, "model": (1, 2)}, "block1-2:rank2", {"zero": 1}),  # whose stage has one rank
    (GPT, {"pipe": 2}, "block3:rank2,block6:rank3", {"overlap_layers": "4"}),  # block3 is in the overlap
    (GPT, {"data": 2}, "block1-2:rank2", {"zero": 3, "offload": "optimizer,parameters,activations"}),
    (EXPERTS, {"data": 1}, "block1:rank1", {"recompute": "block"}),
    (EXPERTS, {"data": 2}, "block0-1:rank2", {}),
    (IMAGES, {"data": 1}, "block1:rank1", {}),
    (IMAGES, {"data": 2}, "stem:rank2,block1:rank3", {"zero": 3}),
    (ADAPTERS, {"shard": 2}, "block0:rank2", {}),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def narrow():
    """Built-in models of text have narrower layers here, and that with experts two of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, layers in ("gpt-nano", 8), ("gpt-moe-nano", 2):
            patch.setitem(GPT_SIZES, name, replace(GPT_SIZES[name], width=36, layers=layers))
        yield


@cache
def trained_alone(model, micro_batches):
    def alone():
        with Mesh() as mesh:
            return trained(build_engine(model, mesh), micro_batches)

    return run_threads(alone, 1)[0]


#: Cases whose meshes, schedules and models others have.
LATER = {
    "block5-6:rank1", "block2-3:rank4", "block0-1:rank2", "embedding:rank2,head:rank1", "block0:rank1,block6-7:rank2",
    "block2-3:rank2", "block2-5:rank1,head:rank1", "stem:rank2,block1:rank3", "block1-2:rank1",
}  # fmt: skip


@pytest.mark.parametrize(
    "model, axes, assign, options",
    [
        pytest.param(*case, id=f"{case[0].name} {case[1]} {case[2]}", marks=[pytest.mark.soak] * (case[2] in LATER))
        for case in CASES
    ],
)
def test_a_helper_rank_computes_what_one_device_does(model, axes, assign, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for what is offloaded
    micro_batches = 4 if "pipe" in axes else 2
    composition = ParallelConfig(mesh=axes, assign=assign, **options)
    expected = trained_alone(model, micro_batches)
    found = on_mesh_and_helpers(model, composition, lambda engine: trained(engine, micro_batches))[0]
    assert found.keys() <= expected.keys() and len(found) > 10
    for name, value in found.items():
        tolerance = {"rtol": 0, "atol": 1e-10 * max(1e-3, np.abs(expected[name]).max())}
        np.testing.assert_allclose(value, expected[name], **tolerance, err_msg=name)


def test_sixteen_bit_activations_are_sent_as_such_and_gradients_as_they_are_summed():
    composition = ParallelConfig(mesh={"data": 1}, assign="block1:rank1")
    model = ModelConfig("gpt-nano", dtype="bfloat16")
    gpt = build_model("gpt-nano")
    step = lambda engine: engine.step(real_batch(gpt, engine, 4, 1, length=8))
    _, sent = on_mesh_and_helpers(model, composition, step)
    block = [layer for name, layer in gpt.layers if name.startswith("block1/")]
    size, width = 2 * 4 * 8, block[0].sizes["d"]
    assert sent["send", "helper", "output"][1] == sent["send", "helper", "gradient"][1] == size * width
    gradients = sum(np.prod(p.whole(layer.sizes)) for layer in block for p in layer.parameters.values())
    assert sent["send", "helper", "weights"][1] == 4 * gradients


@pytest.mark.parametrize(
    "axes, assign, message",
    [
        ({"data": 2}, "block1", "cannot read --assign 'block1' at 'block1'; write LAYERS:rankN"),
        ({"data": 2}, "block1:rank0", "rank 0 writes the run's files"),
        ({"data": 2}, "block1-99999999999:rank2", "gpt-nano has no such layers in a row"),
        ({"data": 2}, "block7-9:rank2", "gpt-nano has no such layers in a row; name a layer, a block or a range"),
        ({"data": 2}, "block1-2:rank2,block2:rank3", "another rank has some of these layers"),
        ({"data": 2, "model": 2}, "block1:rank4", "axis model splits these layers, and a helper rank computes whole"),
        ({"context": 2}, "block1:rank2", "axis context splits these layers"),
    ],
)
def test_what_helper_ranks_cannot_compute_is_one_clear_error(axes, assign, message):
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        ParallelConfig(mesh=axes, assign=assign).check(axes, build_model("gpt-nano"))


def test_experts_that_ranks_share_cannot_be_assigned():
    with pytest.raises(UsageError, match="axis expert splits these layers"):
        ParallelConfig(mesh={"expert": 2}, assign="block0:rank2").check({"expert": 2}, build_model("gpt-moe-nano"))
    ParallelConfig(mesh={"expert": 2}, assign="head:rank2").check({"expert": 2}, build_model("gpt-moe-nano"))


@pytest.mark.mpi(ranks=3)
def test_helper_ranks_take_devices_as_the_other_ranks_of_their_node_do():
    with mesh_beside([1], {"data": 2}) as mesh:
        assert mesh.process_on_node == (world().rank, 3)


def test_a_mesh_is_opened_without_its_helper_ranks():
    def program(helpers, axes):
        mesh_beside(helpers, axes)

    with pytest.raises(UsageError, match="helper rank 3: the job has the ranks 0 to 2"):
        run_threads(program, 3, args=([3], {}))
    with pytest.raises(MeshError, match="mesh data=3 needs 3 ranks, but there are 2"):
        run_threads(program, 3, args=([1], {"data": 3}))
    with pytest.raises(UsageError, match="rank 1 is not outside the mesh, of 1 ranks"), Mesh() as mesh:
        build_engine(GPT, mesh, ParallelConfig(mesh={"data": 1}, assign="block0:rank1"))


def test_other_ranks_end_with_the_error_of_those_on_the_mesh():
    sent = {}

    def program():
        with mesh_beside([1], {}) as mesh:
            try:
                with pytest.raises(UsageError, match="there are no data"), mesh.others as others:
                    if others.have_this:
                        return others.take()
                    raise UsageError("there are no data")
            finally:
                sent[mesh.others.have_this] = calls_and_bytes(mesh.ledger)

    run_threads(program, 2)
    assert sent == {False: {}}  # both are awake, and no message is in flight


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-h2"])
def test_programs_of_stages_and_helper_ranks_fit_together(schedule):
    """However the layers of a model are assigned: each part is computed once, and no rank waits for ever."""
    gpt, rng = build_model("gpt-nano"), np.random.default_rng(0)
    names = list(dict.fromkeys(name.split("/")[0] for name, _ in gpt.layers))
    for stages in 1, 2, 3:
        assigned = ",".join(f"{name}:rank{rank}" for name in names if (rank := rng.integers(1, 9)) < 4)
        axes = {"pipe": stages}
        passes = passes_of(gpt, ParallelConfig(mesh=axes, assign=assigned, schedule=schedule), axes)
        places = range(stages + len(passes.helpers))
        computed = [each for place in places for each in passes.program(3, place) if isinstance(each, Forward)]
        assert len(computed) == len({*computed}) == 3 * len(passes.parts)
        of_helpers = [each for place in places[stages:] for each in passes.program(3, place)]
        moved = [each for each in of_helpers if isinstance(each, MoveGradients)]
        assert {each.chunk for each in moved} == {n for n, part in enumerate(passes.parts) if part.rank is not None}


def test_one_pass_forward_or_backward_visits_each_part_once_in_order():
    gpt, axes = build_model("gpt-nano"), {"pipe": 2}
    passes = passes_of(gpt, ParallelConfig(mesh=axes, assign="embedding:rank2,block5-6:rank3"), axes)
    assert [(part.chunk, part.rank) for part in passes.parts] == [
        (0, None),
        (0, 2),
        (0, None),
        (1, None),
        (1, 3),
        (1, None),
    ]
    computed = {
        kind: [[work for work in passes.one_pass(kind, place) if isinstance(work, Compute)] for place in range(4)]
        for kind in (Forward, Backward)
    }
    assert computed[Forward] == [[Forward(0, n) for n in parts] for parts in ([0, 2], [3, 5], [1], [4])]
    moved = [[MoveGradients(0, 1)], [MoveGradients(0, 4)]]
    own = [[Backward(0, 2)], [Backward(0, 5), Backward(0, 3)]]  # no gradient of data is passed on to part 0
    assert computed[Backward][:2] == [work + after for work, after in zip(own, moved, strict=True)]
    assert computed[Backward][2:] == [[Backward(0, n), MoveGradients(0, n)] for n in (1, 4)]
    programs = [[*passes.one_pass(Forward, place), *passes.one_pass(Backward, place)] for place in range(4)]
    check_programs(programs, passes.places, ["0", "1", "2", "3"])


def test_a_schedule_that_waits_for_itself_is_refused_before_the_first_step():
    class Backwards(Schedule):
        name = "backwards"

        def order(self, stages, micro_batches, stage):
            return [Forward(0, stage), Backward(0, stage)][:: 1 if stage else -1]

    gpt = build_model("gpt-nano")
    chunks = [range(5), range(5, len(gpt.layers))]
    passes = PartedPasses(gpt, parse_assign("block0:rank1"), chunks, 2, Backwards())
    with pytest.raises(UsageError, match="backwards: deadlock with helper ranks: stage 0 at Backward"):
        passes.program(1, 0)
