"""What may be drawn, beside transformers' own logits processors: scripts/make_golden_sampling.py made the vectors."""

from pathlib import Path

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.serving.sampling import SamplingOptions, Vocabulary, allowed_scores

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "sampling.npz")


ALL = Vocabulary()


def allowed(number, vocabulary=ALL, part=slice(None)):
    penalty, temperature, top_k, top_p, min_p = GOLDEN["options"][number].tolist()
    options = SamplingOptions(
        sample=True, repetition_penalty=penalty, temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p
    )
    scores, seen = GOLDEN["scores"][number][None, part], [GOLDEN["seen"][number].tolist()]
    return allowed_scores(scores, options, seen, vocabulary)[0]


def same(found, expected, number):
    """Every third case has equal scores, and which of these transformers leaves is up to its sort, which is unstable:
    then so many of each value are to be left."""
    if number % 3 == 1:
        found, expected = np.sort(found), np.sort(expected)
    said = f"case {number}: {GOLDEN['options'][number]}"
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0, err_msg=said)


def test_what_is_left_and_its_scores():
    for number, expected in enumerate(GOLDEN["allowed"]):
        same(allowed(number), expected, number)


def test_the_same_where_the_vocabulary_is_cut():
    """Over three ranks, unevenly."""
    cuts = (0, 7, 25, 40)

    def program():
        group = Mesh(model=3).group()
        part = slice(*cuts[group.rank : group.rank + 2])
        found = [allowed(number, Vocabulary(part.start, group), part) for number in range(len(GOLDEN["allowed"]))]
        return np.stack(found)

    for number, (found, expected) in enumerate(zip(np.concatenate(run_threads(program, 3), axis=1), GOLDEN["allowed"])):
        same(found, expected, number)
