"""The model of the pages on pipelines: a stack of layers x[b d] + relu(x[b d] · w0[d f]) · w1[f d], numbered by l."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from spmd_engine.comm import Mesh
from spmd_engine.strategies.page import Page, Weight


class LayerStack(Page):
    """Storage of w0[l d f] and w1[l f d], the weights of all ``layers``, with ``shardings``.

    The number of layers does not depend on the number of ranks, as it defines the model.
    """

    sample = "b d"
    sizes = ("model_dim", "hidden_dim")
    kernel: tuple[int, ...] = ()  #: window sizes, if the layers are convolutions

    def __init__(
        self, model_dim: int, hidden_dim: int, mesh: Mesh | None = None, dtype: Any = np.float32, *, layers: int = 8
    ) -> None:
        weights = {
            "layers/w0": Weight((layers, *self.kernel, model_dim, hidden_dim), inputs=prod(self.kernel) * model_dim),
            "layers/w1": Weight((layers, *self.kernel, hidden_dim, model_dim), inputs=prod(self.kernel) * hidden_dim),
        }
        self._store(weights, mesh, dtype)
        self.w0, self.w1 = self.parameters.values()
