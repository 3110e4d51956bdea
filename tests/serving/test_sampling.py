"""Choosing a token: by transformers' rules, written down anew here, and the same however the vocabulary is cut."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.random import gumbel_at
from spmd_engine.errors import UsageError
from spmd_engine.serving.sampling import (
    SamplingOptions,
    Vocabulary,
    _penalised,
    choose,
    generation_config,
    read_generation_config,
)

V = 300
RNG = np.random.default_rng(0)
SCORES = np.concatenate([RNG.normal(0, 4, (5, V)), RNG.integers(-3, 4, (3, V)).astype(float)])  # with many ties
SEEN = [RNG.integers(0, V, 40).tolist() for _ in SCORES]
KEYS = [int(key) for key in RNG.integers(0, 1 << 32, len(SCORES))]
OPTIONS = [
    {},
    {"repetition_penalty": 1.7},
    {"sample": True},
    {"sample": True, "temperature": 0.3},
    {"sample": True, "top_k": 7},
    {"sample": True, "top_k": 1},
    {"sample": True, "top_p": 0.7},
    {"sample": True, "top_p": 0.999, "temperature": 5.0},  # more than the first candidates
    {"sample": True, "top_p": 0.0},
    {"sample": True, "min_p": 0.2},
    {"sample": True, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "temperature": 1.5},
]


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def processed(scores, seen, options):
    """Scores as transformers' processors leave them, in their order; of equal ones the lower is likelier."""
    scores = scores.copy()
    for token in set(seen):
        penalty = options.repetition_penalty
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    if not options.sample:
        return scores
    scores /= options.temperature
    if options.top_k:
        scores[scores < np.sort(scores)[-options.top_k]] = -np.inf
    if options.top_p < 1:
        order = np.argsort(-scores, kind="stable")
        before = np.cumsum(softmax(scores)[order]) - softmax(scores)[order]
        gone = before >= options.top_p
        gone[0] = False
        scores[order[gone]] = -np.inf
    if options.min_p:
        chances = softmax(scores)
        scores[chances < options.min_p * chances.max()] = -np.inf
    return scores


def chosen(ranks, options, log_probs=False):
    def program():
        with Mesh(model=ranks) as mesh:
            group = mesh.group("model") if ranks > 1 else None
            begin, end = V * mesh.rank // ranks, V * (mesh.rank + 1) // ranks
            if ranks == 7:  # uneven, and one rank without any
                begin, end = ([0, 1, 3, 3, 100, 250, 290, V][mesh.rank + more] for more in (0, 1))
            vocabulary = Vocabulary(begin, group)
            part = SCORES[:, begin:end]
            return choose(part, options, seen=SEEN, keys=KEYS, vocabulary=vocabulary, log_probs=log_probs)

    return run_threads(program, ranks)


@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_by_the_rules_however_the_vocabulary_is_cut(given):
    options = SamplingOptions(**given)
    expected = []
    for scores, seen, key in zip(SCORES, SEEN, KEYS):
        kept = processed(scores, seen, options)
        noise = gumbel_at(key, np.arange(V, dtype=np.uint64)) if options.draws else 0
        expected.append(int((kept + noise).argmax()))
    for ranks in (1, 3, 7):
        for found in chosen(ranks, options):
            assert found.tokens.tolist() == expected
            assert (found.margins >= 0).all()


def test_scores_are_as_they_were_afterwards():
    before = SCORES.copy()
    chosen(1, SamplingOptions(**OPTIONS[-1]), log_probs=True)
    np.testing.assert_array_equal(SCORES, before)


@pytest.mark.parametrize("ranks", [1, 3])
def test_log_probabilities_are_the_model_s_own(ranks):
    for found in chosen(ranks, SamplingOptions(**OPTIONS[-1]), log_probs=True):
        expected = [np.log(softmax(scores))[token] for scores, token in zip(SCORES, found.tokens)]
        np.testing.assert_allclose(found.log_probs, expected, rtol=1e-12)


def test_draws_have_the_distribution_of_the_softmax():
    scores, draws = np.array([1.0, 0.0, 2.0, -1.0, 0.5]), 4000
    found = choose(np.tile(scores, (draws, 1)), SamplingOptions(sample=True), seen=[[]] * draws, keys=range(draws))
    counts, expected = np.bincount(found.tokens, minlength=5), draws * softmax(scores)
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-squared of 4 degrees: one in a thousand


def test_a_sharded_choice_sends_a_pair_and_the_second_best_never_the_scores():
    def program():
        with Mesh(model=2) as mesh:
            part = np.random.default_rng(mesh.rank).normal(size=(1, 50_000))
            choose(part, SamplingOptions(), vocabulary=Vocabulary(50_000 * mesh.rank, mesh.group("model")))
            choose(
                part,
                SamplingOptions(sample=True, top_k=50, top_p=0.9),
                seen=[[]],
                keys=[1],
                vocabulary=Vocabulary(50_000 * mesh.rank, mesh.group("model")),
            )
            return mesh.ledger.total().sent

    assert max(run_threads(program, 2)) < 4000


# --- options


def test_an_option_of_drawing_makes_it_draw():
    usual = SamplingOptions()
    assert not usual.draws and not usual.with_given(repetition_penalty=1.2, top_k=None).draws
    assert usual.with_given(top_k=3).draws and usual.with_given(temperature=0.5).draws
    assert not usual.with_given(temperature=0).draws


def test_a_model_s_own_configuration(tmp_path):
    assert read_generation_config(tmp_path).sampling == SamplingOptions()
    config = generation_config({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 7]})
    assert config.sampling == SamplingOptions(sample=True, temperature=0.6, top_p=0.9, top_k=50)
    assert config.ends == (2, 7) and config.unknown == ()
    assert not generation_config({"temperature": 0.6}).sampling.draws
    assert generation_config({"num_beams": 4, "num_beam_groups": 1}).unknown == ("num_beams",)
    (tmp_path / "generation_config.json").write_text("{")
    for content, message in (({"top_p": 7}, "top_p is 7.0"), ({"eos_token_id": "x"}, "eos_token_id is 'x'")):
        with pytest.raises(UsageError, match=message):
            generation_config(content)
    with pytest.raises(UsageError, match="cannot be read as JSON"):
        read_generation_config(tmp_path)


def test_a_penalty_makes_earlier_tokens_less_likely_whatever_the_sign_of_their_scores():
    scores = _penalised(np.array([[-2.0, 2.0, 3.0, -1.0]]), [[11, 10, 10, 3, 14]], 4.0, start=10)
    assert scores.tolist() == [[-8.0, 0.5, 3.0, -1.0]]
