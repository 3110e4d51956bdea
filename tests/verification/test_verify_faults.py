"""verify names the mistakes of an engine of one's own: what is off, where, and the reduction behind it."""

from functools import partial

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.comm.pending import Pending
from spmd_engine.engine import SGD, AdamW
from spmd_engine.strategies import DataParallel, TensorParallel
from spmd_engine.verification import Cause, engine_and_reference, fill_zeros, verify
from spmd_engine.verification.reference import batches_of_shape
from support import tiny
from support.faults import HOW, every_how
from support.pairwise import in_turn

D, F = 5, 7


def disagreement(make, axes, *, optimizer=SGD, start=fill_zeros):
    """The first disagreement of an engine of one's own with the same on one rank."""

    def program():
        with Mesh(**axes) as mesh:
            engine, reference = engine_and_reference(make, mesh)
            start(engine, reference, 3)
            batches = batches_of_shape(engine, reference, (6, D))
            return verify(engine, reference, batches, optimizer=optimizer, rate=0.1)

    reports = run_threads(program, tiny.ranks_of(axes))
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

        def start_all_reduce(self, arr, op="sum", *, over=None, label=""):
            if label == wrong:
                return Pending.completed(self.all_reduce(arr, op, over=over, label=label))
            return super().start_all_reduce(arr, op, over=over, label=label)

    wrong = label
    return partial(Spoiled, D, F)


REDUCTIONS = [
    (DataParallel, "dw0", "data", "gradient of layer_0/weights"),
    (DataParallel, "dw1", "data", "gradient of layer_1/weights"),
    (TensorParallel, "y", "model", "output"),
    (TensorParallel, "dx", "model", "input gradient"),
]


@in_turn(
    4,
    cause={cause.name: cause for cause in HOW},
    **{"strategy, label, axis, what": [pytest.param(*each, id=each[-1]) for each in REDUCTIONS]},
)
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
        def _sum_shares(self, shares):
            return HOW[cause](partial(self.all_reduce, over="data"), shares)

    found = disagreement(partial(Own, D, F), {"data": 2, "model": 3})
    assert (found.what, found.first.index, len(found.findings)) == ("loss", (), 1)
    assert (found.findings[0].cause, found.findings[0].axes) == (cause, ("data",))


def test_axes_of_one_size_are_all_named_unless_a_line_says_which():
    found = disagreement(spoiled(DataParallel, "dw0", HOW[Cause.MEAN]), {"data": 2, "model": 2})
    assert [finding.axes for finding in found.findings] == [("data",)]
    found = disagreement(
        spoiled(DataParallel, "dw0", lambda reduce, x: reduce(x) / reduce(np.ones(1))), {"data": 2, "model": 2}
    )
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
