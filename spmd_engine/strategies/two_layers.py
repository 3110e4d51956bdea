"""The model that most pages of this folder shard: y[b d] = relu(x[b d] · w0[d f]) · w1[f d]."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import Array
from spmd_engine.comm import Mesh
from spmd_engine.comm.notation import Spec
from spmd_engine.strategies.page import Page, Weight


class TwoLayers(Page):
    """Storage of w0[d f] and w1[f d] with ``shardings``. A strategy adds forward and backward."""

    sample = "b d"
    sizes = ("model_dim", "hidden_dim")

    def __init__(self, model_dim: int, hidden_dim: int, mesh: Mesh | None = None, dtype: Any = np.float32) -> None:
        self._store(_weights(model_dim, hidden_dim), mesh, dtype)
        self.w0, self.w1 = self.parameters.values()


class UpdatedRows(TwoLayers):
    """Data parallel, where each rank updates some rows of the weights, ``rows``, and gathers the others' rows after."""

    axes = ("data",)
    shardings = {"layer_0/weights": "d f", "layer_1/weights": "f d"}
    rows = {"layer_0/weights": "d/data f", "layer_1/weights": "f/data d"}
    input_sharding = output_sharding = "b/data d"

    def owned_sharding(self, name):
        return Spec.parse(self.rows[name])

    @property
    def owned(self):
        return {name: parameter[self.owned_index(name)] for name, parameter in self.parameters.items()}

    def forward(self, x):
        z = einsum("bd,df->bf", x, self.w0)
        self.tape.push(x, z)
        return einsum("bf,fd->bd", relu(z), self.w1)

    def after_update(self):
        for name, rows in self.owned.items():
            self.group("data").all_gather(rows, out=self.parameters[name], label=name)


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
