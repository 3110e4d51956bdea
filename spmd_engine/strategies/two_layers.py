"""The model that the pages of this folder cut in different ways: y[b d] = relu(x[b d] · w0[d f]) · w1[f d]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.random import key_of, normal
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.sharding.notation import Spec


class TwoLayers(ShardedEngine):
    """Storage of the two weights as ``shardings`` cuts them. A strategy adds forward and backward."""

    def __init__(self, model_dim: int, hidden_dim: int, mesh: Mesh | None = None, dtype: Any = np.float32) -> None:
        if mesh is not None:
            self.mesh = mesh
        shapes = {"layer_0/weights": (model_dim, hidden_dim), "layer_1/weights": (hidden_dim, model_dim)}
        self.parameters = {
            name: np.zeros(Spec.parse(self.shardings[name]).local_shape(shape, self.mesh), dtype)
            for name, shape in shapes.items()
        }
        self.w0, self.w1 = self.parameters.values()

    def load_checkpoint(self, params: Mapping[str, Any]) -> None:
        for name, parameter in self.parameters.items():
            parameter[...] = self.block(name, params[name])


def initial_parameters(model_dim: int, hidden_dim: int, seed: int = 0, dtype: Any = np.float32) -> dict[str, Array]:
    """Whole starting weights, normal with deviation 1 / sqrt(inputs): functions of the seed alone."""
    shapes = {"layer_0/weights": (model_dim, hidden_dim), "layer_1/weights": (hidden_dim, model_dim)}
    return {name: normal(key_of(seed, name), shape, dtype) / shape[0] ** 0.5 for name, shape in shapes.items()}


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return x * (x > 0)
