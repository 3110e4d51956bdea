"""verify of adapters: beside real frozen weights, on any mesh; and it names a gradient of theirs that is not summed."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints.hf.weights import Pretrained
from spmd_engine.comm.pending import Pending
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.layers import low_rank
from spmd_engine.layers.moe.routing import RouterOptions
from spmd_engine.models import DecoderConfig, Mixture
from spmd_engine.models.lora import LoRAOptions
from spmd_engine.models.names import load_config
from spmd_engine.verification import Cause, engine_of_model, mesh_of_one, verify
from spmd_engine.verification.reference import batches_for_model
from support import tiny
from support.faults import HOW
from support.pairwise import in_turn

FOLDER = Path(__file__).parents[1] / "golden" / "decoders" / "qwen3"
SHAPE = DecoderConfig(
    family="llama", layers=2, width=12, heads=6, key_value_heads=2, hidden=10, vocabulary=13, context=16
)
EXPERTS = SHAPE.changed(
    family="qwen3-moe", qk_norm=True, mixture=Mixture(experts=3, hidden=7, router=RouterOptions(top_k=2))
)
LORA = LoRAOptions(rank=3, alpha=4.5)


def report_of(axes, composition=None, shape=SHAPE, spoil=lambda engine: None, name="adapted", steps=1):
    config = ModelConfig(name, dtype="float64", shape=shape, lora=LORA)

    def program():
        with Mesh(**axes) as mesh:
            engine = engine_of_model(config, mesh, ParallelConfig(mesh=axes, **composition or {}))
            reference = engine_of_model(config, mesh_of_one(), ParallelConfig()) if mesh.rank == 0 else None
            assert all(each.any() for each in [*engine.parameters.values(), *engine.buffers.values()] if each.size)
            spoil(engine)
            batches = batches_for_model(engine.model, 4, length=12, micro_batches=2, seed=0)
            return verify(engine, reference, batches, steps=steps, finite_differences=False)

    return run_threads(program, tiny.ranks_of(axes))[0]


@pytest.mark.parametrize(
    ("axes", "composition", "shape"),
    [
        ({"model": 3}, {"sequence_parallel": True}, SHAPE),
        ({"pipe": 2, "data": 2}, {"zero": 3, "recompute": "block"}, SHAPE),
        ({"expert": 2, "model": 2}, {"zero": 2}, EXPERTS),
    ],
    ids=["sequence parallel", "fully sharded pipeline", "experts"],
)
def test_adapters_agree_beside_frozen_weights_that_are_drawn(axes, composition, shape):
    report = report_of(axes, composition, shape, steps=2)
    assert report.agrees, report.verdict


def test_of_a_model_by_path_the_frozen_weights_are_its_own():
    axes = {"model": 2, "data": 2}
    assert report_of(axes, {"zero": 3}, load_config(FOLDER), name=str(FOLDER)).agrees
    config = ModelConfig(str(FOLDER), dtype="float64", shape=load_config(FOLDER), lora=LORA)
    engine = engine_of_model(config, mesh_of_one(), ParallelConfig())
    stored = Pretrained(FOLDER)["block1/mlp/down"]
    np.testing.assert_array_equal(engine.buffers["block1/mlp/down"], stored[:, :])


class OtherGroup:
    """A group of ranks whose all_reduce is made otherwise."""

    def __init__(self, group, how):
        self.group, self.how = group, how

    def start_all_reduce(self, x, *, out, label):
        out[...] = self.how(partial(self.group.all_reduce, label=label), x)
        return Pending.completed(out)


@in_turn(
    4,
    cause={cause.name: cause for cause in HOW},
    **{
        "name, axes, over": [
            pytest.param("block0/attention/query_lora_a", {"data": 2, "model": 3}, ("data", "model"), id="a"),
            pytest.param("block1/mlp/down_lora_b", {"data": 3, "pipe": 2}, ("data",), id="b"),
        ]
    },
)
def test_an_adapters_gradient_whose_reduction_is_wrong_is_named(cause, name, axes, over):
    def spoil(engine):
        for storage in engine.storages:
            if name in storage.group.spans:
                storage.rest = OtherGroup(storage.rest, HOW[cause])

    found = report_of(axes, {"group_threshold": 0}, spoil=spoil).disagreement
    assert found.what == f"gradient of {name}"
    assert [(finding.cause, finding.axes) for finding in found.findings] == [(cause, over)]


def test_an_adapter_that_forgets_over_which_letter_its_gradient_is_summed_is_named(monkeypatch):
    real = low_rank._union
    monkeypatch.setattr(low_rank, "_union", lambda *letters: real(*letters).replace("f", ""))
    found = report_of({"model": 2}).disagreement
    assert found.what == "gradient of block1/mlp/down_lora_b"  # of the last block, its inputs are cut
    assert [(finding.cause, finding.axes) for finding in found.findings] == [(Cause.MISSING_SUM, ("model",))]
