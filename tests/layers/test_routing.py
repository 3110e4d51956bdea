"""Routing: which experts, with what weights, and the gradients of these."""

from dataclasses import replace

import numpy as np
import pytest

from spmd_engine.errors import UsageError
from spmd_engine.layers.moe.routing import RouterOptions, choose, expert_counts, weights_gradient
from support.numerics import assert_gradient, normals
from support.routers import CUTS, EXPERTS, LOGITS, ROUTERS, WHOLE, assembled, on_ranks, tokens_of

every_router = pytest.mark.parametrize("router", ROUTERS)
FLAT = LOGITS.reshape(-1, EXPERTS)
BIAS = normals(EXPERTS, seed=4) * 0.2


def plainly(logits, bias, options):
    """Experts and weights of one token, written out."""
    z = [float(each) for each in logits]
    exponentials = [np.exp(each - max(z)) for each in z]
    softmax = [each / sum(exponentials) for each in exponentials]
    scores = softmax if options.score == "softmax" else [1 / (1 + np.exp(-each)) for each in z]
    basis = [score + b for score, b in zip(z if options.when == "after" else scores, bias, strict=True)]
    size = len(z) // options.groups
    groups = [range(g * size, (g + 1) * size) for g in range(options.groups)]
    worth = [sum(sorted((basis[e] for e in group), reverse=True)[: options.group_best]) for group in groups]
    best = sorted(range(options.groups), key=lambda g: (-worth[g], g))[: options.top_groups]
    candidates = [e for g in best for e in groups[g]]
    experts = sorted(candidates, key=lambda e: (-basis[e], e))[: options.top_k]
    weights = [exponentials[e] if options.when == "after" else scores[e] for e in experts]
    if options.renormalise or options.when == "after":
        weights = [weight / sum(weights) for weight in weights]
    return experts, [weight * options.scale for weight in weights]


@every_router
@pytest.mark.parametrize("bias", [np.zeros(EXPERTS), BIAS], ids=["", "bias"])
def test_a_choice_is_what_its_formula_says(router, bias):
    choices = choose(FLAT, bias, ROUTERS[router])
    for t, logits in enumerate(FLAT):
        experts, weights = plainly(logits, bias, ROUTERS[router])
        assert choices.experts[t].tolist() == experts
        np.testing.assert_allclose(choices.weights[t], weights, rtol=1e-12)


@every_router
def test_no_bias_is_a_bias_of_zero(router):
    one, other = (choose(FLAT, bias, ROUTERS[router]) for bias in (None, np.zeros(EXPERTS)))
    np.testing.assert_array_equal(one.experts, other.experts)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ties_go_to_the_lower_expert(dtype):
    logits = np.array([[1, 3, 3, 3, 0, 1, 3, 3], [0] * 8, [-np.inf] * 8, [-np.inf] * 5 + [0, -np.inf, 0]], dtype)
    with np.errstate(invalid="ignore"):
        choices = choose(logits, None, RouterOptions(top_k=4, when="after"))
    assert choices.experts.tolist() == [[1, 2, 3, 6], [0, 1, 2, 3], [0, 1, 2, 3], [5, 7, 0, 1]]


def test_softmax_after_the_choice_is_one_before_it_renormalised():
    before, after = (choose(FLAT, None, RouterOptions(when=when)) for when in ("before", "after"))
    np.testing.assert_array_equal(before.experts, after.experts)
    np.testing.assert_allclose(before.weights, after.weights, rtol=1e-14)


@every_router
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_logits_give_finite_weights_and_gradients(router, dtype):
    logits = (normals(20, EXPERTS) * 1e4).astype(dtype)
    choices = choose(logits, None, ROUTERS[router])
    gradient = weights_gradient(choices, np.ones_like(choices.weights))
    assert choices.weights.dtype == gradient.dtype == dtype
    assert np.isfinite(choices.weights).all() and np.isfinite(gradient).all() and np.isfinite(choices.shares).all()
    if ROUTERS[router].renormalise:
        np.testing.assert_allclose(choices.weights.sum(axis=1), ROUTERS[router].scale, rtol=1e-6)


@every_router
def test_the_gradient_of_the_weights(router):
    options, upstream = ROUTERS[router], normals(len(FLAT), ROUTERS[router].top_k, seed=5)
    choices = choose(FLAT, BIAS, options)

    def weighted(logits):
        return float((choose(logits, BIAS, options, decided=choices.decided).weights * upstream).sum())

    assert_gradient(weighted, FLAT, weights_gradient(choices, upstream))


@every_router
def test_the_gradient_is_linear_so_parts_of_it_may_be_summed_later(router):
    choices = choose(FLAT, None, ROUTERS[router])
    one, other = normals(2, *choices.weights.shape, seed=6)
    parts = weights_gradient(choices, one) + weights_gradient(choices, other)
    np.testing.assert_allclose(weights_gradient(choices, one + other), parts, atol=1e-13)


@every_router
def test_what_was_decided_is_not_chosen_anew(router):
    first = choose(FLAT, None, ROUTERS[router])
    again = choose(FLAT, None, ROUTERS[router], decided=first.decided)
    np.testing.assert_array_equal(again.weights, first.weights)
    turned = choose(-FLAT, None, ROUTERS[router], decided=first.decided)
    np.testing.assert_array_equal(turned.experts, first.experts)


@every_router
def test_a_rank_without_tokens(router):
    choices = choose(np.empty((0, EXPERTS)), None, ROUTERS[router])
    k = ROUTERS[router].top_k
    assert choices.experts.shape == choices.weights.shape == (0, k) and choices.experts.dtype == np.int64
    assert weights_gradient(choices, np.empty((0, k))).shape == (0, EXPERTS)
    assert expert_counts(choices).tolist() == [[0] * EXPERTS]


def test_counts_of_experts_together_and_by_sequence():
    choices = choose(FLAT, None, RouterOptions())
    expected = np.zeros((6, EXPERTS), int)
    for t, experts in enumerate(choices.experts):
        for e in experts:
            expected[t // 9, e] += 1
    np.testing.assert_array_equal(expert_counts(choices, sequences=6), expected)
    np.testing.assert_array_equal(expert_counts(choices), expected.sum(axis=0, keepdims=True))
    assert expert_counts(choose(np.empty((0, 4)), None, RouterOptions()), sequences=0).shape == (0, 4)


# --- what is left to chance, or to turns

CHANCES = {
    "weighted": RouterOptions(second_choice="random"),
    "probability": RouterOptions(second_choice="random", second_probability=0.25),
    "random": RouterOptions(routing="random"),
    "balanced": RouterOptions(routing="balanced", top_k=3),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("router", CHANCES)
def test_chance_is_the_same_on_every_mesh(router, cut):
    whole = on_ranks(WHOLE, LOGITS, CHANCES[router], key=7)[0][0]
    ranks = [choices for choices, _ in on_ranks(CUTS[cut], LOGITS, CHANCES[router], key=7)]
    for name in ("experts", "used", "weights"):
        one = assembled(CUTS[cut], [getattr(choices, name) for choices in ranks])
        np.testing.assert_array_equal(one.reshape(54, -1), getattr(whole, name))


def test_a_second_choice_is_used_with_the_given_probability():
    tokens, logits = tokens_of(range(50), range(80)), np.zeros((4000, EXPERTS))
    used = choose(logits, None, CHANCES["probability"], tokens=tokens, key=1).used
    assert used[:, 0].all() and abs(used[:, 1].mean() - 0.25) < 0.03
    other = choose(logits, None, CHANCES["probability"], tokens=tokens, key=2).used
    assert (used != other).any()


@pytest.mark.parametrize("renormalise", [True, False])
def test_a_second_choice_is_used_with_twice_its_share_of_the_weights(renormalise):
    """GShard: certainly where both weigh the same, never where it weighs nothing."""
    options = RouterOptions(second_choice="random", renormalise=renormalise, scale=3.0)
    for share, probability in ((0.5, 1.0), (0.2, 0.4), (1e-9, 0.0)):
        logits = np.tile(np.log([1 - share, share, 1e-12, 1e-12]), (4000, 1))
        used = choose(logits, None, options, tokens=tokens_of(range(50), range(80)), key=3).used
        assert used[:, 0].all() and abs(used[:, 1].mean() - probability) < 0.03


def test_pairs_that_chance_left_out_are_not_counted():
    choices = choose(FLAT, None, CHANCES["probability"], tokens=tokens_of(range(6), range(9)))
    assert expert_counts(choices).sum() == choices.used.sum() < 108


def test_balanced_routing_gives_every_expert_as_many():
    """In each sequence, if it has as many pairs as experts, and else together."""
    for k, positions in ((2, 4), (3, 8), (1, 3)):
        tokens = tokens_of(range(8), range(positions))
        options = RouterOptions(routing="balanced", top_k=k)
        choices = choose(np.zeros((8 * positions, EXPERTS)), None, options, tokens=tokens)
        assert expert_counts(choices).tolist() == [[k * positions] * 8]
        assert all(len(set(row)) == k for row in choices.experts.tolist())
        if k * positions % EXPERTS == 0:
            assert expert_counts(choices, sequences=8).tolist() == [[k * positions // 8] * 8] * 8


def test_random_routing_spreads_and_never_takes_an_expert_twice():
    tokens = tokens_of(range(50), range(80))
    choices = choose(np.zeros((4000, EXPERTS)), None, RouterOptions(routing="random"), tokens=tokens)
    assert (choices.experts[:, 0] != choices.experts[:, 1]).all()
    assert (abs(expert_counts(choices) - 1000) < 120).all()


@pytest.mark.parametrize("routing", ["balanced", "random"])
def test_forced_routing_weighs_by_what_was_learned(routing):
    options = RouterOptions(routing=routing, renormalise=False)
    choices = choose(FLAT, None, options, tokens=tokens_of(range(6), range(9)))
    rows = np.arange(len(FLAT))[:, None]
    np.testing.assert_array_equal(choices.weights, choices.shares[rows, choices.experts])


# --- tokens


def test_tokens_are_numbered_by_sample_and_position_and_know_their_runs():
    tokens = tokens_of([3, 5], [0, 1, 2, 7, 8, 4])
    assert (tokens.numbers() == np.array([[3], [5]]) * 2**24 + [0, 1, 2, 7, 8, 4]).all()
    first, run = tokens.runs()
    assert first.tolist() == [3 * 2**24 + p for p in (0, 7, 4)] + [5 * 2**24 + p for p in (0, 7, 4)]
    assert run.tolist() == [[0, 0, 0, 1, 1, 2], [3, 3, 3, 4, 4, 5]]


# --- options


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"score": "sigmoid", "when": "after"}, "needs score="),
        ({"score": "tanh"}, "softmax, sigmoid"),
        ({"top_k": 0}, "from 1"),
        ({"scale": 0.0}, "positive"),
        ({"capacity_factor": -1.0}, "positive"),
        ({"top_groups": 2}, "groups is 1"),
        ({"second_choice": "random", "top_k": 3}, "top_k=2"),
        ({"second_probability": 0.5}, "second_choice"),
        ({"second_choice": "random", "second_probability": 1.5}, "to 1"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(wrong, says):
    with pytest.raises(UsageError, match=says):
        RouterOptions(**wrong)


@pytest.mark.parametrize(
    "options, experts, says",
    [
        (RouterOptions(top_k=5), 4, "there are 4 experts"),
        (RouterOptions(groups=3), 8, "3 groups of equal size"),
        (RouterOptions(top_k=5, groups=4, top_groups=2), 8, "hold only 4"),
        (RouterOptions(), 0, "at least one"),
    ],
)
def test_options_that_do_not_fit_the_experts(options, experts, says):
    with pytest.raises(UsageError, match=says):
        options.check(experts)


@every_router
def test_options_pass_through_json(router):
    assert RouterOptions.from_json(ROUTERS[router].as_json()) == ROUTERS[router]
    assert replace(ROUTERS[router], bias_rate=1e-3).bias_rate == 1e-3
