"""An evaluation: loss and accuracy over all batches, exact, however model and batch are cut."""

from functools import partial

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import SGD, LayeredEngine, ShardedEngine, as_distributed
from spmd_engine.engine.batch import MicroBatch, make_batch
from spmd_engine.engine.batch import Scores as ScoresOfBatch
from spmd_engine.engine.schedules import named
from spmd_engine.losses import cross_entropy, mean_squared_error, right_classes
from spmd_engine.models import mlp
from spmd_engine.training import Trainer
from support import tiny

SIZES, N = (6, 8, 5, 4), 21
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((N, 6)), RNG.integers(0, 4, N)
MASK = np.arange(N) % 5 != 0


def batches(engine, masked=False):
    """All samples, in a batch of 13 and one of 8; the latter in two micro-batches."""
    made = []
    for first, size, parts in ((0, 13, 1), (13, 8, 2)):

        def load(samples, first=first):
            at = first + samples
            return (X[at], Y[at], MASK[at]) if masked else (X[at], Y[at])

        made.append(make_batch(load, size, parts, engine))
    return made


def evaluated(axes, masked=False, **options):
    def program():
        with Mesh(**axes) as mesh:
            engine = LayeredEngine(mlp(SIZES), mesh, dtype=np.float64, seed=1, **options)
            return Trainer(engine, None, None, None).evaluation(batches(engine, masked))

    return run_threads(program, tiny.ranks_of(axes))


def by_hand(masked):
    with Mesh() as mesh:
        engine = LayeredEngine(mlp(SIZES), mesh, dtype=np.float64, seed=1)
        with engine.inference():
            scores = engine.forward(X)
    likely = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    counts = MASK if masked else np.ones(N, bool)
    losses, right = -np.log(likely[np.arange(N), Y]), scores.argmax(axis=1) == Y
    return losses[counts].mean(), right[counts].sum(), counts.sum()


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 3}, {"model": 3}, {"data": 2, "model": 2}], ids=tiny.mesh_id)
def test_it_is_that_of_all_samples_at_once(axes, masked):
    loss, right, count = by_hand(masked)
    for found in evaluated(axes, masked):
        assert found.count == count and round(found.metrics["accuracy"] * count, 9) == right
        assert found.loss == pytest.approx(loss, rel=1e-12)


def test_the_last_stage_of_a_pipeline_tells_all():
    loss, right, count = by_hand(False)
    for found in evaluated({"pipe": 2, "data": 2}, schedule=named("1f1b")):
        assert (round(found.metrics["accuracy"] * count, 9), found.count) == (right, count)
        assert found.loss == pytest.approx(loss, rel=1e-12)


def trained(make, axes, **options):
    """What a step of 13 samples in two micro-batches, some of which do not count, tells of itself, on each rank."""

    def program():
        with Mesh(**axes) as mesh:
            engine = make(mesh, **options)
            batch = make_batch(lambda samples: (X[samples], Y[samples], MASK[samples]), 13, 2, engine)
            report = Trainer(engine, SGD(), lambda step: batch, lambda step: 0.1).step()
            return report, sum(e.calls for (_, _, label), e in mesh.ledger.entries.items() if label == "loss")

    return run_threads(program, tiny.ranks_of(axes))


MESHES = [{"data": 1}, {"data": 3}, {"model": 3}, {"data": 2, "model": 2}, {"pipe": 2, "data": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=tiny.mesh_id)
def test_a_step_tells_the_accuracy_of_its_batch_before_the_update(axes):
    """Of whole scores by hand; summed with the loss, not after it."""
    options = {"schedule": named("1f1b")} if "pipe" in axes else {}
    with Mesh() as mesh:
        alone = LayeredEngine(mlp(SIZES), mesh, dtype=np.float64, seed=1)
        with alone.inference():
            right = (alone.forward(X[:13]).argmax(axis=1) == Y[:13])[MASK[:13]]
    make = partial(LayeredEngine, mlp(SIZES), dtype=np.float64, seed=1)
    for report, calls in trained(make, axes, **options):
        assert report.as_dict()["accuracy"] == right.mean() and 0 < right.mean() < 1
        assert calls == (0 if set(axes) == {"model"} or axes == {"data": 1} else 1 + ("data" in axes))  # the count


def test_engines_of_one_s_own_tell_it_too():
    right = ((X[:13] @ Whole(Mesh()).parameters["w"]).argmax(axis=1) == Y[:13])[MASK[:13]]
    for make in (Scores, lambda mesh: as_distributed(Whole(Mesh()), mesh)):
        for report, _ in trained(make, {"data": 2}):
            assert report.metrics == {"accuracy": right.mean()}


class Scores(ShardedEngine):
    """An engine of one's own, with a metric."""

    input_sharding, output_sharding, target_sharding = "b/data d", "b/data c", "b/data"
    loss = staticmethod(cross_entropy)
    metrics = {"accuracy": right_classes}

    def __init__(self, mesh):
        self.mesh = mesh
        self.load_checkpoint({"w": np.random.default_rng(2).standard_normal((6, 4))})

    def load_checkpoint(self, params):
        self.parameters = {"w": self.block("w", params["w"])}

    def forward(self, x):
        self.tape.push(x)
        return x @ self.parameters["w"]

    def backward(self, grads):
        dw = self.tape.pop().T @ grads
        return {"w": self.all_reduce(dw, over=self.batch_axes) if self.batch_axes else dw}


class Whole(Scores):
    """The same for one device."""

    input_sharding = output_sharding = target_sharding = ""


def test_an_engine_of_one_s_own_has_metrics_too():
    def program():
        with Mesh(data=2) as mesh:
            engine = Scores(mesh)
            return engine.evaluation(batches(engine)).metrics

    right = (X @ np.random.default_rng(2).standard_normal((6, 4))).argmax(axis=1) == Y
    assert run_threads(program, 2) == [{"accuracy": pytest.approx(right.mean())}] * 2


def test_an_engine_made_distributed_keeps_its_metrics():
    with Mesh(data=1) as mesh:
        assert as_distributed(Whole(mesh), mesh).metrics is Whole.metrics


def test_losses_and_metrics_of_a_device_may_be_floats_or_arrays(cuda):
    outputs = cuda.asarray(X)
    micro = MicroBatch(outputs, cuda.asarray(X - 2.0))
    in_floats = lambda y, t, **options: (4.0, y)
    for loss, metric in ((mean_squared_error, lambda y, t: 3.0), (in_floats, lambda y, t: (y > t).sum())):
        scores = ScoresOfBatch(loss, {"metric": metric})
        scores.add(outputs, micro, X.size)
        assert scores.shares.tolist() == pytest.approx([4.0, 3.0 if loss is mean_squared_error else X.size])
