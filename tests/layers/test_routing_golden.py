"""Routers of known models, against transformers' own (scripts/make_golden_routing.py)."""

from pathlib import Path

import numpy as np
import pytest

from spmd_engine.layers.moe.moe import balance_gradient, balance_loss, z_gradient, z_loss
from spmd_engine.layers.moe.routing import RouterOptions, choose, expert_counts, weights_gradient

GOLDEN = dict(np.load(Path(__file__).parent.parent / "golden" / "routing.npz"))
LOGITS = GOLDEN["logits"]
MODELS = {
    "mixtral": RouterOptions(),
    "qwen3": RouterOptions(top_k=4),
    "qwen3_plain": RouterOptions(top_k=4, renormalise=False),
    "gpt_oss": RouterOptions(top_k=3, when="after"),
    "deepseek_v3": RouterOptions(top_k=3, score="sigmoid", scale=2.5, groups=4, top_groups=2),
}


@pytest.mark.parametrize("model", MODELS)
def test_experts_weights_and_gradient(model):
    choices = choose(LOGITS, GOLDEN["bias"] if model == "deepseek_v3" else None, MODELS[model])
    order = choices.experts.argsort(axis=1)
    np.testing.assert_array_equal(np.take_along_axis(choices.experts, order, axis=1), GOLDEN[f"{model}/experts"])
    weights = np.take_along_axis(choices.weights, order, axis=1)
    np.testing.assert_allclose(weights, GOLDEN[f"{model}/weights"], rtol=1e-13)
    upstream = np.take_along_axis(GOLDEN["upstream"], choices.experts, axis=1)
    np.testing.assert_allclose(weights_gradient(choices, upstream), GOLDEN[f"{model}/gradient"], atol=1e-14)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_balance_loss(k):
    choices = choose(LOGITS, None, RouterOptions(top_k=k))
    counts = expert_counts(choices)
    assert balance_loss(choices, counts, len(LOGITS), 1.0) == pytest.approx(GOLDEN[f"balance/{k}"], rel=1e-13)
    gradient = balance_gradient(choices, counts, len(LOGITS), 1.0)
    np.testing.assert_allclose(gradient, GOLDEN[f"balance_gradient/{k}"], atol=1e-15)


def test_the_z_loss():
    assert z_loss(LOGITS, len(LOGITS), 1.0) == pytest.approx(GOLDEN["z_loss"], rel=1e-13)
    np.testing.assert_allclose(z_gradient(LOGITS, len(LOGITS), 1.0), GOLDEN["z_gradient"], atol=1e-14)
