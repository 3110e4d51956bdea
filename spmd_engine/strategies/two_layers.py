"""The model that most pages of this folder shard: y[b d] = relu(x[b d] · w0[d f]) · w1[f d]."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm import Mesh
from spmd_engine.strategies.page import Page, Weight


class TwoLayers(Page):
    """Storage of w0[d f] and w1[f d] with ``shardings``. A strategy adds forward and backward."""

    sample = "b d"
    sizes = ("model_dim", "hidden_dim")

    def __init__(self, model_dim: int, hidden_dim: int, mesh: Mesh | None = None, dtype: Any = np.float32) -> None:
        self._store(_weights(model_dim, hidden_dim), mesh, dtype)
        self.w0, self.w1 = self.parameters.values()


def initial_parameters(model_dim: int, hidden_dim: int, seed: int = 0, dtype: Any = np.float32) -> dict[str, Array]:
    """The unsharded initial weights, parts of which ``initialize`` gives each rank."""
    weights = _weights(model_dim, hidden_dim)
    return {name: weight.initial(seed, name, dtype) for name, weight in weights.items()}


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return x * (x > 0)


def _weights(model_dim: int, hidden_dim: int) -> dict[str, Weight]:
    return {
        "layer_0/weights": Weight((model_dim, hidden_dim), inputs=model_dim),
        "layer_1/weights": Weight((hidden_dim, model_dim), inputs=hidden_dim),
    }
