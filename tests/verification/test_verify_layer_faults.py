"""verify names mistakes of layers, and of what the layered engine does around them."""

from functools import partial

import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays import einsum
from spmd_engine.comm.pending import Pending
from spmd_engine.engine import AdamW
from spmd_engine.layers import MLP
from spmd_engine.verification import Cause, mesh_of_one, verify
from support import tiny
from support.faults import HOW
from support.pairwise import in_turn


class Wrong(MLP):
    """An MLP one of whose reductions over f is made otherwise."""

    how = forward_is_wrong = None

    def forward(self, sh, p, x, ctx):
        h, slope = self.activation(einsum("bsd,df->bsf", x, p["w0"]) + p["b0"], want_slope=True)
        y = self._reduced(sh, einsum("bsf,fd->bsd", h, p["w1"]), self.forward_is_wrong)
        return y + p["b1"], (x, h, slope)

    def backward_input(self, sh, p, saved, dy):
        x, h, slope = saved
        dz = einsum("bsd,fd->bsf", dy, p["w1"]) * slope
        dx = self._reduced(sh, einsum("bsf,df->bsd", dz, p["w0"]), not self.forward_is_wrong)
        return dx, (x, h, dz, dy, dy)

    def _reduced(self, sh, x, wrong):
        group = sh.mesh.group("model")
        return self.how(group.all_reduce, x) if wrong else group.all_reduce(x)


def spoil_layer(how, forward, engine):
    layer = dict(engine.model.layers)["block1/mlp"].inner
    layer.__class__ = Wrong
    layer.how, layer.forward_is_wrong = how, forward


def gpt_disagreement(axes, spoil, *, optimizer=AdamW, layers=tiny.SIZE.layers, **options):
    """The first disagreement of a tiny GPT that is spoiled on the mesh, but not alone."""

    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, layers=layers, **options)
            spoil(engine)
            reference = tiny.make_engine(mesh_of_one(), layers=layers) if mesh.rank == 0 else None
            # The reference is always the same: that it computes its gradients, ``test_verify`` shows.
            return verify(engine, reference, tiny.batch, optimizer=optimizer, finite_differences=False)

    report = run_threads(program, tiny.ranks_of(axes))[0]
    assert not report.agrees
    return report.disagreement


@in_turn(
    6,
    cause={cause.name: cause for cause in HOW},
    forward={"output": True, "input gradient": False},
    axes={tiny.mesh_id(axes): axes for axes in ({"data": 2, "model": 3}, {"model": 3, "pipe": 2})},
)
def test_a_layer_whose_reduction_is_wrong_is_named(cause, forward, axes):
    found = gpt_disagreement(axes, partial(spoil_layer, HOW[cause], forward))
    assert (found.step, found.kind, found.layer) == (1, "output" if forward else "input gradient", "block1/mlp")
    assert found.micro_batch == 0
    assert [(finding.cause, finding.axes) for finding in found.findings] == [(cause, ("model",))]


class OtherGroup:
    """A group of ranks whose all_reduce is made otherwise."""

    def __init__(self, group, how):
        self.group, self.how = group, how

    def start_all_reduce(self, x, *, out, label):
        out[...] = self.how(partial(self.group.all_reduce, label=label), x)
        return Pending.completed(out)


def spoil_gradient(name, how, engine):
    for storage in engine.storages:
        if name in storage.group.spans:
            storage.rest = OtherGroup(storage.rest, how)


@in_turn(
    4,
    cause={cause.name: cause for cause in HOW},
    **{"axes, over": [({"data": 3, "model": 2}, "data"), ({"replicate": 3, "shard": 2}, "replicate")]},
)
def test_a_gradient_whose_reduction_is_wrong_is_named(cause, axes, over):
    name = "block0/attention/output"
    found = gpt_disagreement(axes, partial(spoil_gradient, name, HOW[cause]), group_threshold=0, layers=1)
    assert (found.what, found.layer) == (f"gradient of {name}", "block0/attention")
    assert [(finding.cause, finding.axes) for finding in found.findings] == [(cause, (over,))]


def test_a_tied_gradient_that_stages_do_not_sum_is_named():
    spoil = partial(spoil_gradient, "embedding/table", HOW[Cause.MISSING_SUM])
    found = gpt_disagreement({"pipe": 3, "model": 2}, spoil)
    assert found.what == "gradient of embedding/table" and found.ranks == (0, 1, 4, 5)
    assert [(finding.cause, finding.axes) for finding in found.findings] == [(Cause.MISSING_SUM, ("pipe",))]


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_parameters_that_owners_do_not_tell_are_named(zero):
    def spoil(engine):
        engine.after_update = lambda: None

    found = gpt_disagreement({"data": 2, "model": 2}, spoil, zero=zero)
    assert (found.step, found.kind) == (1, "parameter")
    assert [finding.cause for finding in found.findings] == [Cause.STALE]
