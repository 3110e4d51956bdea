"""verify names each kind of mistake: what is off, where, and the reduction that is missing or made twice."""

from functools import partial

import numpy as np
import pytest

import tiny
from spmd_engine import Mesh, run, world
from spmd_engine.arrays import einsum
from spmd_engine.comm.pending import Pending
from spmd_engine.engine import SGD, AdamW
from spmd_engine.layers import MLP
from spmd_engine.strategies import DataParallel, TensorParallel
from spmd_engine.verify import Cause, engine_and_reference, fill_zeros, mesh_of_one, verify
from spmd_engine.verify.blocks import Block
from spmd_engine.verify.diagnosis import diagnose
from spmd_engine.verify.samples import batches_of_shape

D, F = 5, 7
HOW = {
    Cause.MISSING_SUM: lambda reduce, x: x,
    Cause.REPEATED_SUM: lambda reduce, x: reduce(reduce(x)),
    Cause.MEAN: lambda reduce, x: reduce(x, "mean"),
}
every_how = pytest.mark.parametrize("cause", HOW, ids=lambda cause: cause.name)


def disagreement(make, axes, *, optimizer=SGD, start=fill_zeros):
    """The first disagreement of an engine of one's own with the same on one rank."""

    def program():
        with Mesh(**axes) as mesh:
            engine, reference = engine_and_reference(make, mesh)
            start(engine, reference, 3)
            batches = batches_of_shape(engine, reference, (6, D))
            return verify(engine, reference, batches, optimizer=optimizer, rate=0.1)

    reports = run(program, tiny.ranks_of(axes))
    assert all(repr(report) == repr(reports[0]) for report in reports)
    assert not reports[0].agrees and reports[0].disagreement.distance > 1e-4
    return reports[0].disagreement


# --- reductions of an engine of one's own


def spoiled(strategy, label, how):
    """A strategy whose reduction of that label is made otherwise. On one rank, it makes no difference."""

    class Spoiled(strategy):
        def all_reduce(self, arr, op="sum", *, over=None, label=""):
            right = partial(super().all_reduce, over=over, label=label)
            return how(right, arr) if label == wrong else right(arr, op)

        def start(self, operation, *args, over=None, label=""):
            if label == wrong:
                return Pending.completed(self.all_reduce(*args, over=over, label=label))
            return super().start(operation, *args, over=over, label=label)

    wrong = label
    return partial(Spoiled, D, F)


REDUCTIONS = [
    (DataParallel, "dw0", "data", "gradient of layer_0/weights"),
    (DataParallel, "dw1", "data", "gradient of layer_1/weights"),
    (TensorParallel, "y", "model", "output"),
    (TensorParallel, "dx", "model", "input gradient"),
]


@every_how
@pytest.mark.parametrize(("strategy", "label", "axis", "what"), REDUCTIONS, ids=[what for *_, what in REDUCTIONS])
def test_a_reduction_that_is_dropped_made_twice_or_a_mean_is_named(cause, strategy, label, axis, what):
    found = disagreement(spoiled(strategy, label, HOW[cause]), {"data": 2, "model": 3})
    assert (found.step, found.what, found.ranks) == (1, what, (0, 1, 2, 3, 4, 5))
    (finding,) = found.findings
    assert (finding.cause, finding.axes) == (cause, (axis,))
    size = {"data": 2, "model": 3}[axis]
    assert finding.factor == pytest.approx({Cause.REPEATED_SUM: size, Cause.MEAN: 1 / size}.get(cause, 1))
    assert axis in finding.text and finding.text in str(found)


def test_a_norm_that_counts_replicas_is_named():
    found = disagreement(spoiled(DataParallel, "gradient norm", HOW[Cause.REPEATED_SUM]), {"data": 3})
    assert found.what == "squared norm of the gradient" and found.findings[0].cause is Cause.REPEATED_SUM


@every_how
def test_a_loss_that_is_not_the_global_mean_is_named(cause):
    class Own(DataParallel):
        def _sum_loss(self, value):
            return float(HOW[cause](partial(self.all_reduce, over="data"), np.array(value)))

    found = disagreement(partial(Own, D, F), {"data": 2, "model": 3})
    assert (found.what, found.first.index, len(found.findings)) == ("loss", (), 1)
    assert (found.findings[0].cause, found.findings[0].axes) == (cause, ("data",))


def test_axes_of_one_size_are_all_named():
    found = disagreement(spoiled(DataParallel, "dw0", HOW[Cause.MEAN]), {"data": 2, "model": 2})
    assert [finding.axes for finding in found.findings] == [("data",), ("model",)]


# --- stale values, and others


def test_a_gradient_of_the_step_before_is_named():
    class Late(DataParallel):
        late = None

        def backward(self, grads):
            now = super().backward(grads)
            late, self.late = self.late or now, now
            return late if self.num_devices > 1 else now

    found = disagreement(partial(Late, D, F), {"data": 2})
    assert (found.step, found.what) == (2, "gradient of layer_1/weights")
    assert [finding.cause for finding in found.findings] == [Cause.STALE]


class Lazy(AdamW):
    """Leaves out the update of the parameters on rank 2."""

    def _update(self, *arrays, **options):
        if world().rank != 2:
            super()._update(*arrays, **options)


@pytest.mark.parametrize("strategy", [DataParallel, TensorParallel])
def test_a_parameter_that_one_rank_does_not_update_is_named(strategy):
    found = disagreement(partial(strategy, D, F), {"data": 2, "model": 2}, optimizer=Lazy)
    assert (found.step, found.what, found.ranks) == (1, "parameter layer_0/weights", (2,))
    assert [finding.cause for finding in found.findings] == [Cause.STALE]
    assert found.first.rank == found.largest.rank == 2 and found.first.coordinates == {"data": 1, "model": 0}


def test_an_update_made_twice_is_named():
    class Hasty(SGD):
        def update(self, engine, *args, **options):
            for _ in range(2 if engine.num_devices > 1 else 1):
                super().update(engine, *args, **options)

    found = disagreement(partial(DataParallel, D, F), {"data": 2}, optimizer=Hasty)
    assert found.what == "parameter layer_0/weights"
    assert found.findings[0].text == "its update is 2 times what it should be"


def test_ranks_that_start_apart_are_named():
    def make(mesh):
        engine = DataParallel(D, F, mesh, np.float64)
        engine.parameters["layer_1/weights"][...] = np.random.default_rng(mesh.rank).standard_normal((F, D))
        return engine

    found = disagreement(make, {"data": 2, "model": 2}, start=lambda *_: None)
    assert (found.step, found.what, found.ranks) == (0, "initial parameter layer_1/weights", (1, 2, 3))
    assert [finding.axes for finding in found.findings] == [("data",), ("model",)]
    assert {finding.cause for finding in found.findings} == {Cause.REPLICAS_DIFFER}


def test_the_element_is_named_by_its_place_in_the_whole():
    class Trembling(SGD):
        def update(self, engine, *args, **options):
            super().update(engine, *args, **options)
            if engine.num_devices > 1 and engine.mesh.coordinates["model"] == 1:
                w0 = engine.parameters["layer_0/weights"]
                w0[1, 2] += 3.0
                w0[4, 0] -= 5.0

    found = disagreement(partial(TensorParallel, D, F), {"data": 2, "model": 2}, optimizer=Trembling)
    assert (found.what, found.layer, found.ranks) == ("parameter layer_0/weights", "layer_0", (1, 3))
    assert (found.first.index, found.first.rank) == ((1, 6), 1)  # of 7 columns, the second rank has the last three
    assert (found.largest.index, found.largest.rank) == ((4, 4), 1)
    assert found.first.found == pytest.approx(found.first.expected + 3.0)
    assert not found.findings and "none of the causes" in str(found)
    assert "at [1, 6] on rank 1 (data=0, model=1)" in str(found)


def test_numbers_that_are_none_are_found():
    class Breaking(SGD):
        def update(self, engine, *args, **options):
            super().update(engine, *args, **options)
            if engine.num_devices > 1:
                engine.parameters["layer_1/weights"][3, 3] = np.nan

    found = disagreement(partial(DataParallel, D, F), {"data": 2}, optimizer=Breaking)
    assert found.first.index == (3, 3) and np.isnan(found.first.found) and found.distance == np.inf


# --- layers and what the layered engine does around them


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


def gpt_disagreement(axes, spoil, *, optimizer=AdamW, **options):
    """The first disagreement of a tiny GPT that is spoiled on the mesh, but not alone."""

    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, **options)
            spoil(engine)
            reference = tiny.make_engine(mesh_of_one()) if mesh.rank == 0 else None
            return verify(engine, reference, tiny.batch, optimizer=optimizer)

    report = run(program, tiny.ranks_of(axes))[0]
    assert not report.agrees
    return report.disagreement


@every_how
@pytest.mark.parametrize("forward", [True, False], ids=["output", "input gradient"])
@pytest.mark.parametrize("axes", [{"data": 2, "model": 3}, {"model": 3, "pipe": 2}], ids=tiny.mesh_id)
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
    for storage in engine._storages:
        if name in storage.group.spans:
            storage.rest = OtherGroup(storage.rest, how)


@every_how
@pytest.mark.parametrize(
    ("axes", "over"), [({"data": 3, "model": 2}, "data"), ({"replicate": 3, "shard": 2}, "replicate")]
)
def test_a_gradient_whose_reduction_is_wrong_is_named(cause, axes, over):
    name = "block0/attention/output"
    found = gpt_disagreement(axes, partial(spoil_gradient, name, HOW[cause]), group_threshold=0)
    assert (found.what, found.layer) == (f"gradient of {name}", "block0/attention")
    assert [(finding.cause, finding.axes) for finding in found.findings] == [(cause, (over,))]


def test_a_tied_gradient_that_stages_do_not_sum_is_named():
    spoil = partial(spoil_gradient, "embedding/table", HOW[Cause.MISSING_SUM])
    found = gpt_disagreement({"pipe": 3, "model": 2}, spoil)
    assert found.what == "gradient of embedding/table" and found.ranks == (0, 1, 4, 5)
    assert [(finding.cause, finding.axes) for finding in found.findings] == [(Cause.MISSING_SUM, ("pipe",))]


@pytest.mark.parametrize("zero", [1, 2])
def test_parameters_that_owners_do_not_tell_are_named(zero):
    def spoil(engine):
        engine.after_update = lambda: None

    found = gpt_disagreement({"data": 2, "model": 2}, spoil, zero=zero)
    assert (found.step, found.kind) == (1, "parameter")
    assert [finding.cause for finding in found.findings] == [Cause.STALE]


# --- causes, on blocks made by hand


def blocks(found, expected, *, axes, **more):
    """A block of one tensor, whole on every rank, for each rank of the mesh."""
    places = list(np.ndindex(*axes.values()))
    index = tuple(map(np.arange, np.shape(expected)))
    coordinates = [dict(zip(axes, place, strict=True)) for place in places]
    return [
        Block(rank, where, index, np.array(values, float), np.array(expected, float), **more)
        for rank, (where, values) in enumerate(zip(coordinates, found, strict=True))
    ]


AXES = {"data": 2, "model": 2}
RIGHT = np.array([1.0, -2.0, 4.0])


def causes(found, *, axes=None, kind="gradient", micro_batches=1, **more):
    axes = axes or AXES
    made = blocks(found, RIGHT, axes=axes, **more)
    return [(f.cause, f.axes) for f in diagnose(made, axes, 1e-9, kind=kind, micro_batches=micro_batches)]


def test_a_sum_over_two_axes_needs_both():
    parts = np.random.default_rng(0).standard_normal((3, 3))
    assert causes([*parts, RIGHT - parts.sum(axis=0)]) == [(Cause.MISSING_SUM, ("data", "model"))]
    assert causes([RIGHT * 4] * 4) == [(Cause.REPEATED_SUM, ("data", "model"))]


def test_a_part_to_which_a_sum_is_added_has_no_share_in_it():
    base, parts = np.array([5.0, 6.0, 7.0]), np.random.default_rng(0).standard_normal((2, 3))
    parts[1] += RIGHT - base - parts.sum(axis=0)
    found = [base + part for part in parts] * 2
    assert causes(found, base=base) == [(Cause.MISSING_SUM, ("model",))]
    assert causes(found) != [(Cause.MISSING_SUM, ("model",))]


def test_multiples():
    assert causes([RIGHT * 3] * 4, micro_batches=3) == [(Cause.REPEATED_SUM, ())]
    assert causes([RIGHT / 3] * 4, micro_batches=3) == [(Cause.MEAN, ())]
    assert causes([RIGHT * -0.37] * 4) == [(Cause.FACTOR, ())]
    assert causes([RIGHT * [1, 1, 3]] * 4) == []


def test_one_number_is_no_multiple_of_another_but_by_the_ranks():
    for factor, expected in ((0.37, []), (0.5, [(Cause.MEAN, ("data",)), (Cause.MEAN, ("model",))])):
        made = blocks([3.0 * factor] * 4, 3.0, axes=AXES)
        assert [(f.cause, f.axes) for f in diagnose(made, AXES, 1e-9, kind="loss")] == expected


def test_zeros_and_replicas_that_differ():
    assert causes([RIGHT, RIGHT, [1, 0, 4], [0, 0, 4]]) == [(Cause.ZERO, ())]
    assert causes([RIGHT, RIGHT + 1, RIGHT, RIGHT + 1]) == [(Cause.REPLICAS_DIFFER, ("model",))]
    assert causes([RIGHT, RIGHT + 1, RIGHT, RIGHT], kind="parameter") == [
        (Cause.REPLICAS_DIFFER, ("data",)),
        (Cause.REPLICAS_DIFFER, ("model",)),
    ]
