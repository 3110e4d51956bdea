"""Scores of texts: those of a forward of the whole, on every mesh."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.errors import UsageError
from spmd_engine.serving.scoring import score
from support import tiny

RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, 13, length).tolist() for length in (11, 2, 27, 6)]  # the context is 10


def scored(axes):
    def program():
        with Mesh(**axes) as mesh:
            return [each.log_probs for each in score(tiny.make_engine(mesh), TEXTS, stride=4, batch_size=3)]

    return run_threads(program, tiny.ranks_of(axes))


def expected(text):
    """Each token by the first window of ten, beginning every four, that has it."""
    engine, found = tiny.make_engine(Mesh()), {}
    with engine.inference():
        for begin in range(0, len(text), 4):
            scores = engine.forward(np.array([text[begin : begin + 10]]))[0]
            likely = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
            for place, token in enumerate(text[begin + 1 : begin + 11]):
                found.setdefault(begin + 1 + place, likely[place, token])
    return [found[place] for place in range(1, len(text))]


def test_scores_are_those_of_whole_windows_on_every_mesh():
    (alone,) = scored({"data": 1})
    for text, likely in zip(TEXTS, alone):
        np.testing.assert_allclose(likely, expected(text), rtol=1e-12)
    for axes in {"data": 2, "model": 2}, {"pipe": 2}, {"context": 3}:
        for found in scored(axes):
            for likely, other in zip(alone, found):
                np.testing.assert_allclose(other, likely, rtol=1e-11)


@pytest.mark.parametrize(("text", "message"), [([1], "has 1 token"), ([1, 13], "has token 13; gpt knows 0 to 12")])
def test_texts_that_cannot_be_scored(text, message):
    with Mesh() as mesh, pytest.raises(UsageError, match=message):
        score(tiny.make_engine(mesh), [text])
