"""Activations of another program: the first layer that differs from them is named, on any mesh."""

from pathlib import Path

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.layers import Layer
from spmd_engine.verification.probe import compare_activations
from support import tiny

FOLDER = Path(__file__).parents[1] / "golden" / "decoders" / "qwen3"
GOLDEN = dict(np.load(FOLDER / "reference.npz"))


class Kept(Layer):
    """A layer whose outputs are kept."""

    def __init__(self, out, name, layer):
        self.out, self.name, self.layer = out, name, layer

    def forward(self, sh, p, x, ctx):
        y, *rest = self.layer.forward(sh, p, x, ctx)
        self.out[self.name] = y
        return y, *rest

    def backward_input(self, sh, p, saved, dy, *side):
        raise NotImplementedError


@pytest.fixture(scope="module")
def reference():
    out, tokens = {}, GOLDEN["tokens"]
    engine, _ = open_pretrained(ModelConfig(str(FOLDER), dtype="float64"), Mesh())
    with engine.inference(), engine.wrapped(lambda name, layer: Kept(out, name, layer)):
        engine.forward(tokens)
    np.testing.assert_allclose(out["head"], GOLDEN["logits64"], rtol=0, atol=1e-10)
    return {"tokens": tokens, "hidden_states.0": out.pop("embedding"), "logits": out.pop("head")} | out


def compared(reference, axes, composition, spoil=lambda engine: None):
    def program():
        with Mesh(**axes) as mesh:
            engine, _ = open_pretrained(
                ModelConfig(str(FOLDER), dtype="float64"), mesh, ParallelConfig(mesh=axes, **composition)
            )
            spoil(engine)
            return compare_activations(engine, reference, 1e-9)

    found = run_threads(program, tiny.ranks_of(axes))
    assert all(each == found[0] for each in found)
    return found[0]


MESHES = [
    ({"data": 1}, {}),
    ({"context": 2, "model": 2}, {"sequence_parallel": True}),
    ({"pipe": 2, "data": 2}, {}),
]


@pytest.mark.parametrize(("axes", "composition"), MESHES, ids=lambda each: str(each) if "p" in str(each) else "")
def test_the_first_layer_that_differs(reference, axes, composition):
    distances = compared(reference, axes, composition)
    assert [each.layer for each in distances][:3] == ["embedding", "block0/attention", "block0/mlp"]
    assert all(each.place is None and each.distance < 1e-12 for each in distances)

    def spoil(engine):
        for name, parameter in engine.parameters.items():
            if name == "block1/attention/query_norm":  # at position 0 there is one key, whatever the query
                parameter *= 1.001

    distances = compared(reference, axes, composition, spoil)
    wrong = [(each.layer, each.place) for each in distances if each.place is not None]
    assert wrong[0] == ("block1/attention", (0, 1))
    assert [layer for layer, _ in wrong] == ["block1/attention", "block1/mlp", "norm", "head"]


def test_a_reference_that_does_not_fit(reference):
    with pytest.raises(UsageError, match="'layer7', which no layer is called"):
        compared(reference | {"layer7": GOLDEN["logits64"]}, {"data": 1}, {})
    with pytest.raises(UsageError, match="norm of shape .*: the output has other lengths or widths"):
        compared(reference | {"norm": reference["norm"][:, :5]}, {"data": 1}, {})
    with pytest.raises(UsageError, match="the reference has no array 'tokens'"):
        compared({"norm": reference["norm"]}, {"data": 1}, {})


def test_blocks_whose_branches_are_side_by_side():
    """Such a block is one layer, behind what transformers calls hidden_states.0."""
    folder = FOLDER.parent / "gpt_neox"
    golden = dict(np.load(folder / "reference.npz"))
    engine, _ = open_pretrained(ModelConfig(str(folder), dtype="float64"), Mesh())
    embedded = engine.gather("embedding/table")[golden["tokens"]]
    reference = {"tokens": golden["tokens"], "hidden_states.0": embedded, "logits": golden["logits64"]}
    found = compare_activations(engine, reference, 1e-9)
    assert [each.layer for each in found] == ["embedding", "head"] and all(each.place is None for each in found)
