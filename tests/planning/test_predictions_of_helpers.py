"""What helper ranks send, hold and launch, as predicted by the dry run."""

import pytest

from spmd_engine.engine import SGD
from spmd_engine.engine.helpers import helper_ranks
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models.names import build_model
from spmd_engine.planning import analyze
from spmd_engine.planning.machine.machine import default_machine
from spmd_engine.planning.simulator.check_prediction import predicted_sums
from spmd_engine.planning.simulator.simulation import simulate
from spmd_engine.training import Trainer
from support.helped import calls_and_bytes, on_mesh_and_helpers
from support.real_steps import real_batch


@pytest.mark.parametrize(
    "axes, assign",
    [({"data": 2}, "block1-2:rank2"), ({"pipe": 2}, "block0:rank1,block4:rank3"), ({"pipe": 2}, "block3-5:rank1")],
)
def test_messages_of_a_step_are_as_predicted_on_both_ends(axes, assign):
    composition = ParallelConfig(mesh=axes, assign=assign)
    model = ModelConfig("gpt-nano", dtype="float64")

    def program(engine):
        batch = real_batch(build_model("gpt-nano"), engine, 8, 2, length=16)
        trainer = Trainer(engine, SGD(), lambda step: batch, lambda step: 0.1, step_metrics=False)
        engine.mesh.ledger.clear()
        trainer.step()
        return calls_and_bytes(engine.mesh.ledger)

    analysis = analyze(model, axes, composition, batch_size=8, micro_batches=2, sequence=16, optimizer=SGD())
    results = on_mesh_and_helpers(model, composition, program)
    helpers = helper_ranks(composition.assigned)
    on_mesh, on_helpers = ([r for n, r in enumerate(results) if (n in helpers) is of] for of in (False, True))

    lines = dict.fromkeys(line for ledger in on_mesh for line in ledger)
    sums = {line: tuple(sum(x.get(line, (0, 0))[n] for x in on_mesh) for n in (0, 1)) for line in lines}
    assert sums == predicted_sums(analysis)
    for ledger, rank_class in zip(on_helpers, analysis.classes[-len(helpers) :], strict=True):
        assert ledger == {line: (calls, sent) for line, (calls, _, sent) in rank_class.step.ledger().items()}
    assert analysis.ranks == 2 + len(helpers) == len(analysis.peak_bytes_by_rank())
    assert simulate(analysis, default_machine("cpu")).seconds > 0


def test_an_owner_keeps_no_activations_of_assigned_layers():
    model, sizes = ModelConfig("gpt-nano"), {"batch_size": 8, "micro_batches": 1}
    (alone,) = analyze(model, {"data": 1}, ParallelConfig(), **sizes).peak_bytes_by_rank()
    helped = ParallelConfig(mesh={"data": 1}, assign="block2-7:rank1")
    owner, helper = analyze(model, {"data": 1}, helped, **sizes).peak_bytes_by_rank()
    assert owner < 0.6 * alone and helper < 0.8 * alone


def test_launches_of_a_helper_rank_are_counted():
    helped = ParallelConfig(mesh={"data": 1}, assign="block2-7:rank1")
    analysis = analyze(ModelConfig("gpt-nano"), {"data": 1}, helped, batch_size=2, device="cuda")
    alone = analyze(ModelConfig("gpt-nano"), {"data": 1}, batch_size=2, device="cuda")
    owner, helper = (analysis.of_rank(rank).launches for rank in (0, 1))
    assert 0.5 * owner < helper < alone.of_rank(0).launches
