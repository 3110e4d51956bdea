"""An evaluation: loss and accuracy over all batches, exact, however model and batch are cut."""

import numpy as np
import pytest

import tiny
from spmd_engine import Mesh, run
from spmd_engine.engine import LayeredEngine, ShardedEngine, as_distributed
from spmd_engine.engine.batch import make_batch
from spmd_engine.engine.schedules import named
from spmd_engine.layers import cross_entropy, right_classes
from spmd_engine.models import mlp
from spmd_engine.training import Trainer

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

    return run(program, tiny.ranks_of(axes))


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
        return x @ self.parameters["w"]

    def backward(self, grads):
        raise NotImplementedError


def test_an_engine_of_one_s_own_has_metrics_too():
    def program():
        with Mesh(data=2) as mesh:
            engine = Scores(mesh)
            return engine.evaluation(batches(engine)).metrics

    right = (X @ np.random.default_rng(2).standard_normal((6, 4))).argmax(axis=1) == Y
    assert run(program, 2) == [{"accuracy": pytest.approx(right.mean())}] * 2


def test_an_engine_made_distributed_keeps_its_metrics():
    with Mesh(data=1) as mesh:
        class Whole(Scores):
            input_sharding = output_sharding = target_sharding = ""

        assert as_distributed(Whole(mesh), mesh).metrics is Whole.metrics
