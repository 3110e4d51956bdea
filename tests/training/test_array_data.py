"""NumPy arrays as data: every epoch each sample once, in an order that is a function of seed and numbers alone."""

import numpy as np
import pytest

from spmd_engine import ArrayData, Mesh, run_threads
from spmd_engine.errors import UsageError
from spmd_engine.strategies import DataParallel
from support import tiny

X, Y = np.arange(46.0).reshape(23, 2), np.arange(23) % 3  # sample i has x[i, 0] = 2i


def numbers(batch):
    """The samples of a batch, by the global numbers of their places in it."""
    parts = [(m.samples, m.inputs[:, 0] / 2) for m in batch.micro_batches]
    return {int(place): int(number) for places, rows in parts for place, number in zip(places, rows, strict=True)}


def batches(axes, steps, data=None, **options):
    """For each step, which sample stands at which place of the batch; all ranks' together."""

    def program():
        with Mesh(**axes) as mesh:
            engine = DataParallel(2, 3, mesh)
            arrays = data or ArrayData(X, Y, validation=0.25, seed=4)
            return [numbers(arrays.batch(engine, step, size=5, **options)) for step in range(steps)]

    results = run_threads(program, tiny.ranks_of(axes))
    return [{place: n for rank in results for place, n in rank[step].items()} for step in range(steps)]


def test_every_epoch_has_each_sample_once_in_another_order():
    data = ArrayData(X, Y, validation=0.25, seed=4)
    assert len(data.held_out) == 6 and sorted([*data.held_out, *data.train]) == list(range(23))
    stream = [n for step in batches({"data": 1}, 34, data) for n in step.values()]  # ten epochs of 17
    epochs = [stream[17 * e : 17 * (e + 1)] for e in range(10)]
    assert all(sorted(epoch) == data.train.tolist() for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 10


@pytest.mark.parametrize("axes", [{"data": 3}, {"data": 2}], ids=str)
def test_the_order_is_that_of_one_rank_on_every_mesh(axes):
    assert batches(axes, 8, micro_batches=2) == batches({"data": 1}, 8)


def test_a_step_needs_none_of_those_before():
    with Mesh() as mesh:
        engine = DataParallel(2, 3, mesh)
        resumed = numbers(ArrayData(X, Y, validation=0.25, seed=4).batch(engine, 7, size=5))
    assert resumed == batches({"data": 1}, 8)[7]


def test_other_seeds_give_another_order_and_another_split():
    one, other = ArrayData(X, Y, validation=0.5, seed=1), ArrayData(X, Y, validation=0.5, seed=2)
    assert one.held_out.tolist() != other.held_out.tolist()
    assert ArrayData(X, Y, seed=1).epoch(0).tolist() != ArrayData(X, Y, seed=2).epoch(0).tolist()


@pytest.mark.parametrize("y, terms", [(Y, 1), (X * 2, 2)], ids=["classes", "numbers"])
def test_targets_belong_to_their_inputs_and_are_counted(y, terms):
    with Mesh() as mesh:
        data = ArrayData(X, y, validation=0.25)
        batch = data.batch(DataParallel(2, 3, mesh), 3, size=5)
        (micro,) = batch.micro_batches
        np.testing.assert_array_equal(micro.targets, y[(micro.inputs[:, 0] / 2).astype(int)])
        assert batch.count == 5 * terms


def test_validation_is_all_that_is_held_out_in_order():
    with Mesh() as mesh:
        data = ArrayData(X, Y, validation=0.25)
        for micro_batches, sizes in (1, [[4], [2]]), (2, [[2, 2], [2]]), (3, [[2, 2], [2]]), (4, [[1] * 4, [1] * 2]):
            found = data.validation_batches(DataParallel(2, 3, mesh), size=4, micro_batches=micro_batches)
            assert [[len(micro.inputs) for micro in batch.micro_batches] for batch in found] == sizes
            rows = np.concatenate([micro.inputs for batch in found for micro in batch.micro_batches])
            np.testing.assert_array_equal(rows, X[data.held_out])


def test_the_digest_is_of_what_is_in_the_arrays():
    digest = ArrayData(X, Y).sha256
    assert digest == ArrayData(X.copy(), Y.copy(), seed=3).sha256 != ArrayData(X + 1, Y).sha256
    assert digest != ArrayData(X.astype(np.float32), Y).sha256


@pytest.mark.parametrize(
    "x, y, validation, message",
    [
        (X, Y[:-1], 0, "x has 23 samples and y 22"),
        (X, Y, 1.0, "validation=1.0 is a fraction"),
        (X[:1], Y[:1], 0.9, "leave none to learn from"),
        (X[:0], Y[:0], 0, "leave none to learn from"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(x, y, validation, message):
    with pytest.raises(UsageError, match=message):
        ArrayData(x, y, validation=validation)
