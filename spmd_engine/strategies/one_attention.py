"""The model of the attention pages: y[b s d] = softmax(mask(q · k / sqrt(k))) · v · output, with h causal heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd_engine.comm import Mesh
from spmd_engine.errors import UsageError
from spmd_engine.strategies.page import Page, Weight


class OneAttention(Page):
    """Storage of query[d h k], key[d h k], value[d h k] and output[h k d] with ``shardings``.

    Raises UsageError unless ``heads`` divides ``model_dim``: the ratio is the width k of a head.
    """

    sample = "b s d"
    sizes = ("model_dim", "heads")

    def __init__(self, model_dim: int, heads: int, mesh: Mesh | None = None, dtype: Any = np.float32) -> None:
        if heads < 1 or model_dim % heads:
            raise UsageError(f"attention: {heads} heads must divide model_dim, which is {model_dim}")
        width = model_dim // heads
        projection = Weight((model_dim, heads, width), inputs=model_dim)
        output = Weight((heads, width, model_dim), inputs=model_dim)
        weights = {"query": projection, "key": projection, "value": projection, "output": output}
        self._store({f"attention/{name}": weight for name, weight in weights.items()}, mesh, dtype)
        self.query, self.key, self.value, self.output = self.parameters.values()
        self.scale = width**-0.5  # the factor of scores, so that they do not grow with k
