"""Losses: values against plain formulas, gradients by finite differences, the vocabulary whole and cut."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.comm.blocks import span
from spmd_engine.errors import UsageError
from spmd_engine.losses import cross_entropy, mean_squared_error
from support.numerics import assert_gradient, frozen, normals

SHAPE, VOCABULARY = (2, 5), 13
LOGITS = frozen(3 * normals(*SHAPE, VOCABULARY))
TARGETS = frozen(np.random.default_rng(1).integers(0, VOCABULARY, SHAPE))
MASK = frozen(np.random.default_rng(2).integers(0, 2, SHAPE))


def plain_cross_entropy(logits, targets, weights=None, count=None):
    weights = np.ones(targets.shape) if weights is None else weights
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    chosen = np.take_along_axis(probabilities, targets[..., None].astype(int), axis=-1)[..., 0]
    return (-np.log(chosen) * weights).sum() / (weights.sum() if count is None else count)


def whole(logits=LOGITS, targets=TARGETS, **options):
    """The loss on one device: its value, and its gradient."""
    return cross_entropy(logits.copy(), targets, **options)


def cut(ranks, logits=LOGITS, targets=TARGETS, **options):
    """The loss with the vocabulary over ``ranks``: everyone's value, and the gradient put together."""

    def rank():
        mesh = Mesh(model=ranks)
        part = span(logits.shape[-1], ranks, mesh.rank)
        group = mesh.group("model")
        return cross_entropy(logits[..., part].copy(), targets, over=group, start=part.start, **options)

    values, gradients = zip(*run_threads(rank, ranks=ranks))
    return values, np.concatenate(gradients, axis=-1)


# --- cross-entropy on one device


@pytest.mark.parametrize("mask", [None, MASK, MASK.astype(bool), MASK.astype(np.float32)])
def test_value(mask):
    value, _ = whole(mask=mask)
    assert isinstance(value, float)
    assert value == pytest.approx(plain_cross_entropy(LOGITS, TARGETS, mask), rel=1e-12)


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("count", [None, 40])
def test_gradient(mask, count):
    _, gradient = whole(mask=mask, count=count)
    assert_gradient(lambda logits: plain_cross_entropy(logits, TARGETS, mask, count), LOGITS, gradient)
    assert_gradient(lambda logits: whole(logits, mask=mask, count=count)[0], LOGITS, gradient)


def test_hidden_tokens_have_no_gradient():
    _, gradient = whole(mask=MASK)
    assert (gradient[MASK == 0] == 0).all() and (gradient[MASK == 1] != 0).all()


def test_what_is_hidden_does_not_matter():
    other = np.where(MASK[..., None], LOGITS, 99.0)
    targets = np.where(MASK, TARGETS, 0)
    for a, b in zip(whole(other, targets, mask=MASK), whole(mask=MASK)):
        np.testing.assert_array_equal(a, b)


def test_all_hidden():
    value, gradient = whole(mask=np.zeros(SHAPE, bool))
    assert value == 0 and not gradient.any()


def test_count_makes_shares_of_one_mean():
    """Micro-batches, and ranks of the data axis: values and gradients are only ever summed."""
    value, gradient = whole(mask=MASK)
    parts = [whole(LOGITS[i], TARGETS[i], mask=MASK[i], count=MASK.sum()) for i in range(len(LOGITS))]
    assert sum(part for part, _ in parts) == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(np.stack([g for _, g in parts]), gradient, atol=1e-15)


def test_shapes_that_only_broadcast_are_refused():
    with pytest.raises(UsageError, match="outputs of shape"):
        mean_squared_error(np.ones((6, 1)), np.ones(6))


def test_no_tokens():
    value, gradient = whole(LOGITS[:0], TARGETS[:0])
    assert value == 0 and gradient.shape == (0, *SHAPE[1:], VOCABULARY)


def test_the_gradient_is_written_over_the_outputs():
    logits = LOGITS.copy()
    assert np.shares_memory(cross_entropy(logits, TARGETS)[1], logits)


def test_logits_that_are_not_contiguous():
    value, gradient = cross_entropy(LOGITS.transpose(1, 0, 2).copy().transpose(1, 0, 2), TARGETS)
    assert value == whole()[0]
    np.testing.assert_array_equal(gradient, whole()[1])


def test_float32_stays():
    value, gradient = whole(LOGITS.astype(np.float32), mask=MASK.astype(bool))
    assert gradient.dtype == np.float32
    assert value == pytest.approx(whole(mask=MASK)[0], rel=1e-6)


# --- the vocabulary cut

RANKS = [2, 3, 8, 16]  # 13 words on 16 ranks: the last three have none


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mask", [None, MASK, MASK.astype(bool)])
def test_cut_as_whole(ranks, mask):
    value, gradient = whole(mask=mask, count=20)
    values, gathered = cut(ranks, mask=mask, count=20)
    np.testing.assert_allclose(values, value, rtol=1e-12)
    assert len(set(values)) == 1
    np.testing.assert_allclose(gathered, gradient, atol=1e-14)


def test_cut_without_tokens():
    values, gradient = cut(3, LOGITS[:0], TARGETS[:0])
    assert values == (0, 0, 0) and gradient.size == 0


def test_logits_are_never_gathered():
    """Two all_reduces a loss: a maximum, then two numbers, of each token."""

    def rank():
        mesh = Mesh(model=2)
        cross_entropy(LOGITS[..., mesh.rank :: 2].copy(), TARGETS, over=mesh.group("model"))
        return {key: (entry.calls, entry.payload) for key, entry in mesh.ledger.entries.items()}

    tokens = TARGETS.size
    assert run_threads(rank, ranks=2) == [{("all_reduce", "model", "loss"): (2, 3 * tokens * 8)}] * 2


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("scale", [1e3, 1e300])
def test_large_logits_do_not_overflow(ranks, scale):
    logits = np.linspace(-scale, scale, VOCABULARY) * np.ones((*SHAPE, 1))
    targets = np.full(SHAPE, VOCABULARY - 1)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        values, gradient = cut(ranks, logits, targets)
    np.testing.assert_allclose(values, 0, atol=1e-12)
    np.testing.assert_allclose(gradient, 0, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_target_without_a_chance_costs_what_it_should(ranks):
    logits = np.zeros((1, 4))
    logits[0, 2] = 1000.0
    values, gradient = cut(ranks, logits, np.array([1]))
    np.testing.assert_allclose(values, 1000)
    np.testing.assert_allclose(gradient, [[0, -1, 1, 0]], atol=1e-12)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int8, np.int32])
def test_targets_of_any_whole_numbers(dtype):
    """Small unsigned ones must not wrap where a rank's first word is subtracted."""
    logits, targets = normals(6, 300), np.array([0, 1, 43, 44, 120, 127])
    value, gradient = whole(logits, targets)
    values, gathered = cut(5, logits, targets.astype(dtype))
    np.testing.assert_allclose(values, value, rtol=1e-12)
    np.testing.assert_allclose(gathered, gradient, atol=1e-14)


# --- mean squared error


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 4)])
@pytest.mark.parametrize("count", [None, 50])
def test_mean_squared_error(shape, count):
    outputs, targets = normals(*shape), normals(*shape, seed=1)
    value, gradient = mean_squared_error(outputs, targets, count=count)
    assert value == pytest.approx(((outputs - targets) ** 2).sum() / (count or outputs.size), rel=1e-12)
    assert_gradient(lambda x: mean_squared_error(x, targets, count=count)[0], outputs, gradient)


def test_mean_squared_error_of_nothing():
    value, gradient = mean_squared_error(np.zeros((0, 3)), np.zeros((0, 3)))
    assert value == 0 and gradient.shape == (0, 3)


def test_mean_squared_error_keeps_float32():
    outputs = normals(5, dtype=np.float32)
    assert mean_squared_error(outputs, np.zeros(5, np.float32))[1].dtype == np.float32
