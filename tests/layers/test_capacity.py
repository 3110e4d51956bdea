"""Capacity: who stays when an expert is full, over all tokens of a micro-batch however they are cut."""

from dataclasses import replace

import numpy as np
import pytest

from spmd_engine.layers.moe.dispatch import capacity_of, in_quanta, keep
from spmd_engine.layers.moe.routing import RouterOptions
from support.numerics import normals
from support.pairwise import every_pair
from support.routers import CUTS, EXPERTS, LOGITS, WHOLE, assembled, chosen, collectively, on_ranks, tokens_of

BY = ("position", "probability")
OPTIONS = {
    "k=2": RouterOptions(),
    "k=3": RouterOptions(top_k=3, score="sigmoid", renormalise=False),
    "k=1": RouterOptions(top_k=1, renormalise=False),
    "random second": RouterOptions(second_choice="random"),
}


def rounded(weight):
    """The nearest number with nine significant bits."""
    quantum = 2.0 ** (np.floor(np.log2(weight)) - 8)
    return np.floor(weight / quantum + 0.5) * quantum


def plainly(choices, capacity):
    """Which pairs of a whole micro-batch stay, claim by claim."""
    rows, k = choices.experts.shape
    claims = [(j, t) for j in range(k) for t in range(rows) if choices.used[t, j]]
    if choices.options.drop_by == "probability":
        claims.sort(key=lambda claim: -rounded(choices.weights[claim[1], claim[0]]))  # stable: ties stay in order
    taken, kept = [0] * choices.shares.shape[1], np.zeros((rows, k), bool)
    for j, t in claims:
        expert = choices.experts[t, j]
        kept[t, j] = taken[expert] < capacity
        taken[expert] += 1
    return kept


@every_pair(cut=list(CUTS), capacity=[0, 1, 7, 1000], options=list(OPTIONS), drop_by=BY)
def test_the_same_pairs_stay_on_every_cut(cut, drop_by, options, capacity):
    options = replace(OPTIONS[options], drop_by=drop_by)
    expected = plainly(on_ranks(WHOLE, LOGITS, options)[0][0], capacity)
    kept = collectively(
        lambda choices, tokens, gather: keep(choices, capacity, tokens, gather), on_ranks(CUTS[cut], LOGITS, options)
    )
    np.testing.assert_array_equal(assembled(CUTS[cut], kept).reshape(expected.shape), expected)


@pytest.mark.parametrize("cut", CUTS)
def test_equal_weights_stay_in_the_order_of_claims(cut):
    options = RouterOptions(drop_by="probability", top_k=3)
    logits = np.zeros((6, 9, EXPERTS))
    expected = plainly(on_ranks(WHOLE, logits, options)[0][0], 10)
    kept = collectively(
        lambda choices, tokens, gather: keep(choices, 10, tokens, gather), on_ranks(CUTS[cut], logits, options)
    )
    np.testing.assert_array_equal(assembled(CUTS[cut], kept).reshape(expected.shape), expected)
    assert expected.sum() == 30  # ten tokens of each of the three experts that win all ties


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype, error", [(np.float64, 1e-14), (np.float32, 1e-7)])
def test_equal_tokens_stay_in_the_order_of_claims_despite_rounding_errors(dtype, error, cut):
    """Equal tokens have weights that differ in the last bits, in other ways on each mesh."""
    options = RouterOptions(drop_by="probability")
    logits = np.repeat(LOGITS[:, :3], 3, axis=1)[[0, 0, 0, 1, 1, 2]].astype(dtype)
    expected = plainly(on_ranks(WHOLE, logits, options)[0][0], 10)
    kept = collectively(
        lambda choices, tokens, gather: keep(choices, 10, tokens, gather),
        on_ranks(CUTS[cut], logits + error * normals(*logits.shape, seed=len(cut)).astype(dtype), options),
    )
    np.testing.assert_array_equal(assembled(CUTS[cut], kept).reshape(expected.shape), expected)


def test_weights_are_compared_in_quanta():
    weights = np.abs(normals(2000, seed=1)) + 1e-3
    order, values = np.argsort(rounded(weights)), in_quanta(weights)
    np.testing.assert_array_equal(np.diff(values[order]) > 0, np.diff(rounded(weights)[order]) > 0)
    assert (np.diff(values[order]) >= 0).all()
    for dtype, error in (np.float64, 2**-45), (np.float32, 2**-21):
        likely = np.array([0.0, 1.0, 2.5] + [1 / n for n in range(2, 17)], dtype)
        for change in 1 - error, 1 + error:
            np.testing.assert_array_equal(in_quanta(likely * dtype(change)), in_quanta(likely))
    below, above = in_quanta(weights * (1 - 2**-8)), in_quanta(weights * (1 + 2**-8))
    assert (below < above).all() and (in_quanta(weights) - below <= 2).all()


def one(choices, capacity, positions):
    return keep(choices, capacity, tokens_of([0], range(positions)), lambda own: [own]).tolist()


def test_first_choices_come_before_second_ones_whatever_the_token():
    choices = chosen([[1, 0], [0, 1], [0, 2]])
    assert one(choices, 1, 3) == [[True, False], [True, False], [False, True]]


@pytest.mark.parametrize("drop_by", BY)
def test_first_choices_come_before_second_ones_of_equal_weight_too(drop_by):
    choices = chosen([[1, 0], [0, 1], [2, 0], [0, 2]])
    choices = replace(choices, options=replace(choices.options, drop_by=drop_by))
    assert one(choices, 2, 4) == [[True, False], [True, True], [True, False], [True, True]]


def test_by_probability_the_highest_weights_stay():
    weights = np.array([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3]])
    choices = chosen([[0, 1], [0, 1], [0, 1]], weights=weights)
    choices = replace(choices, options=replace(choices.options, drop_by="probability"))
    assert one(choices, 1, 3) == [[False, True], [True, False], [False, False]]


def test_what_chance_left_out_claims_nothing():
    used = np.array([[True, False], [True, True]])
    assert one(chosen([[0, 1], [2, 1]], used=used), 1, 2) == [[True, False], [True, True]]


def test_without_a_capacity_nothing_is_dropped_nor_gathered():
    choices = chosen([[0, 1], [0, 1]])
    assert keep(choices, None, tokens_of([0], [0, 1]), gather=None).all()


@pytest.mark.parametrize("drop_by", BY)
def test_all_ranks_without_tokens(drop_by):
    options = RouterOptions(drop_by=drop_by)
    choices = replace(chosen(np.empty((0, 2))), options=options)
    for tokens in (tokens_of([], range(9)), tokens_of(range(6), [])):
        assert keep(choices, 3, tokens, lambda own: [own, own]).shape == (0, 2)


def test_capacity_is_the_decimal_fraction_that_was_written():
    """100 x 1.1 / 10 is a little more than 11 in binary."""
    assert capacity_of(RouterOptions(top_k=1, capacity_factor=1.1), 100, 10) == 11
    assert capacity_of(RouterOptions(top_k=2, capacity_factor=1.25), 54, 8) == 17  # 16.875
    assert capacity_of(RouterOptions(capacity_factor=0.01, minimum_capacity=4), 54, 8) == 4
    assert capacity_of(RouterOptions(), 54, 8) is None
