"""Balance losses, z-loss, entropy and the bias: as defined over the whole micro-batch, on any cut of it."""

import numpy as np
import pytest

from spmd_engine.layers.moe.moe import balance_gradient, balance_loss, bias_fold, entropy, z_gradient, z_loss
from spmd_engine.layers.moe.routing import RouterOptions, choose, expert_counts
from support.numerics import assert_gradient, normals
from support.routers import CUTS, EXPERTS, LOGITS, ROUTERS, WHOLE, assembled, block, on_ranks

FLAT = LOGITS.reshape(-1, EXPERTS)
KINDS = "mixtral", "after", "plain", "deepseek"  # with another softmax, or sigmoid, or k
every_kind = pytest.mark.parametrize("kind", KINDS)
every_cut = pytest.mark.parametrize("cut", CUTS)


def plainly(choices, rows):
    """E · Σ f P of some rows, by loops over experts and rows."""
    pairs = sum(choices.used[t].sum() for t in rows)
    total = 0.0
    for e in range(EXPERTS):
        f = sum(((choices.experts[t] == e) & choices.used[t]).sum() for t in rows) / pairs
        total += f * sum(choices.shares[t, e] / choices.shares[t].sum() for t in rows) / len(rows)
    return EXPERTS * total


@every_kind
def test_the_loss_over_the_micro_batch_and_over_sequences(kind):
    choices = choose(FLAT, None, ROUTERS[kind])
    assert balance_loss(choices, expert_counts(choices), 54, 0.1) == pytest.approx(0.1 * plainly(choices, range(54)))
    sequences = [plainly(choices, range(9 * b, 9 * b + 9)) for b in range(6)]
    by_sequence = balance_loss(choices, expert_counts(choices, sequences=6), 54, 0.1)
    assert by_sequence == pytest.approx(0.1 * np.mean(sequences))


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_perfect_balance_gives_one_for_any_k(score, k):
    options = RouterOptions(top_k=k, score=score)
    logits = np.stack([np.roll([3.0, 2, 1, 0, -1, -2, -3, -4], shift) for shift in range(EXPERTS)])
    choices = choose(logits, None, options)
    assert balance_loss(choices, expert_counts(choices), EXPERTS, 1.0) == pytest.approx(1.0)


@every_kind
@pytest.mark.parametrize("sequences", [1, 6])
def test_the_gradient_of_the_balance_loss(kind, sequences):
    choices = choose(FLAT, None, ROUTERS[kind])
    counts = expert_counts(choices, sequences)

    def loss(logits):
        return balance_loss(choose(logits, None, ROUTERS[kind], decided=choices.decided), counts, 54, 3.0)

    assert_gradient(loss, FLAT, balance_gradient(choices, counts, 54, 3.0))


@every_kind
@every_cut
def test_ranks_add_up_to_the_loss_of_one_device(kind, cut):
    whole = on_ranks(WHOLE, LOGITS, ROUTERS[kind])[0][0]
    ranks = [choices for choices, _ in on_ranks(CUTS[cut], LOGITS, ROUTERS[kind])]
    counts = sum(expert_counts(choices) for choices in ranks)
    np.testing.assert_array_equal(counts, expert_counts(whole))
    losses = [balance_loss(choices, counts, 54, 0.3) for choices in ranks]
    assert sum(losses) == pytest.approx(balance_loss(whole, counts, 54, 0.3), rel=1e-13)
    gradients = assembled(CUTS[cut], [balance_gradient(choices, counts, 54, 0.3) for choices in ranks])
    np.testing.assert_allclose(gradients.reshape(54, -1), balance_gradient(whole, counts, 54, 0.3), rtol=1e-12)
    assert sum(entropy(choices, 54) for choices in ranks) == pytest.approx(entropy(whole, 54), rel=1e-13)


@every_cut
def test_ranks_add_up_to_the_loss_by_sequence(cut):
    """Counts of a sequence are summed over the ranks that hold parts of it, and over no others."""
    options = ROUTERS["deepseek"]
    whole = on_ranks(WHOLE, LOGITS, options)[0][0]
    ranks = [choices for choices, _ in on_ranks(CUTS[cut], LOGITS, options)]
    losses, gradients = [], []
    for (samples, _), choices in zip(CUTS[cut], ranks, strict=True):
        others = [other for (theirs, _), other in zip(CUTS[cut], ranks, strict=True) if theirs == samples]
        counts = sum(expert_counts(other, len(samples)) for other in others)
        losses.append(balance_loss(choices, counts, 54, 0.3))
        gradients.append(balance_gradient(choices, counts, 54, 0.3))
    counts = expert_counts(whole, 6)
    assert sum(losses) == pytest.approx(balance_loss(whole, counts, 54, 0.3), rel=1e-13)
    gradient = assembled(CUTS[cut], gradients).reshape(54, -1)
    np.testing.assert_allclose(gradient, balance_gradient(whole, counts, 54, 0.3), rtol=1e-12)


def test_of_a_ranks_own_counts_it_is_the_ranks_own_loss_weighted_by_tokens():
    ranks = [choices for choices, _ in on_ranks(CUTS["batch"], LOGITS, RouterOptions())]
    loss = sum(balance_loss(choices, expert_counts(choices), 54, 1.0) for choices in ranks)
    assert loss == pytest.approx((9 * plainly(ranks[0], range(9)) + 45 * plainly(ranks[1], range(45))) / 54)


@every_cut
def test_z_loss_and_its_gradient(cut):
    expected = np.mean([np.log(sum(np.exp(z) for z in row)) ** 2 for row in FLAT])
    parts = [block(LOGITS, *rank) for rank in CUTS[cut]]
    assert sum(z_loss(part, 54, 0.2) for part in parts) == pytest.approx(0.2 * expected)
    gradient = assembled(CUTS[cut], [z_gradient(part, 54, 0.2) for part in parts]).reshape(FLAT.shape)
    assert_gradient(lambda logits: z_loss(logits, 54, 0.2), FLAT, gradient)


def test_the_z_loss_of_large_logits_is_finite():
    logits = np.array([[1000.0, 0.0], [-1000.0, -1000.0]])
    assert z_loss(logits, 2, 1.0) == pytest.approx((1000.0**2 + (np.log(2) - 1000.0) ** 2) / 2)
    assert np.isfinite(z_gradient(logits, 2, 1.0)).all()


def test_entropy_of_none_and_of_perfect_certainty():
    assert entropy(choose(np.zeros((5, EXPERTS)), None, RouterOptions()), 5) == pytest.approx(np.log(EXPERTS))
    certain = np.where(np.arange(EXPERTS) == 3, 1000.0, 0.0)[None]
    assert entropy(choose(certain, None, RouterOptions()), 1) == 0


def test_the_bias_rises_for_experts_with_less_than_the_mean_and_does_not_drift():
    bias = bias_fold(np.array([0.5, 0.0, 0.0, -0.5]), np.array([9, 3, 0, 0]), 0.1)
    np.testing.assert_allclose(bias, np.array([0.5, 0.0, 0.0, -0.5]) + np.array([-0.1, 0, 0.1, 0.1]) - 0.025)
    assert bias.sum() == pytest.approx(0)


def test_the_bias_balances_a_router_that_prefers_some_experts():
    logits = normals(512, EXPERTS, seed=8) + np.linspace(-1, 1, EXPERTS)
    options, bias = RouterOptions(score="sigmoid"), np.zeros(EXPERTS)
    before = expert_counts(choose(logits, bias, options))[0]
    for _ in range(300):
        bias = bias_fold(bias, expert_counts(choose(logits, bias, options))[0], 3e-3)
    after = expert_counts(choose(logits, bias, options))[0]
    assert before.max() > 1.5 * before.mean() and after.max() < 1.1 * after.mean()


@pytest.mark.parametrize("sequences", [1, 3, 0])
def test_a_rank_without_tokens(sequences):
    nothing, counts = np.empty((0, EXPERTS)), np.ones((sequences, EXPERTS), np.int64)
    choices = choose(nothing, None, RouterOptions())
    assert balance_loss(choices, counts, 54, 1.0) == entropy(choices, 54) == z_loss(nothing, 54, 1.0) == 0
    assert balance_gradient(choices, counts, 54, 1.0).shape == (0, EXPERTS)
    assert z_gradient(nothing, 54, 1.0).shape == (0, EXPERTS)
