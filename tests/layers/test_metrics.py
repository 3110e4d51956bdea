"""Accuracy: NumPy's argmax of whole scores, however the classes are cut; ties go to the lowest class."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.comm.blocks import span
from spmd_engine.losses import right_classes

CLASSES = 7
RNG = np.random.default_rng(0)
SCORES = RNG.integers(0, 3, (50, CLASSES)).astype(np.float32)  # many are equal
TARGETS = SCORES.argmax(axis=1) + RNG.integers(0, 2, 50) * RNG.integers(-1, 2, 50)
TARGETS = TARGETS.clip(0, CLASSES - 1).astype(np.uint8)
MASK = RNG.random(50) < 0.7
RIGHT = SCORES.argmax(axis=1) == TARGETS


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_cut_classes_are_counted_as_whole_ones(ranks, mask):
    def program():
        with Mesh(model=ranks) as mesh:
            mine = span(CLASSES, ranks, mesh.rank)  # empty for some of nine
            return right_classes(SCORES[:, mine], TARGETS, mask=mask, over=mesh.group("model"), start=mine.start)

    expected = RIGHT.sum() if mask is None else (RIGHT & mask).sum()
    assert 0 < expected < 50
    assert run_threads(program, ranks) == [expected] * ranks


def test_scores_may_have_more_dims():
    assert right_classes(SCORES.reshape(5, 10, CLASSES), TARGETS.reshape(5, 10)) == RIGHT.sum()


def test_no_samples_and_scores_that_are_no_numbers_are_none_right():
    assert right_classes(SCORES[:0], TARGETS[:0]) == 0
    assert right_classes(np.full((2, 3), np.nan), np.array([0, 1])) == 0
