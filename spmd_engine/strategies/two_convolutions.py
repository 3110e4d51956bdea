"""The model of the image pages: y[b h w c] = conv(relu(conv(x[b h w c], w0)), w1), windows of 3 x 3."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.images import conv2d, conv2d_input_gradient, conv2d_weight_gradient
from spmd_engine.arrays.precision import rounded
from spmd_engine.arrays.windows import Window
from spmd_engine.comm import Mesh
from spmd_engine.strategies.page import Page, Weight

IMAGE = 7, 5  # h and w: small enough for tests, and prime, so that shards are uneven


class TwoConvolutions(Page):
    """Storage of w0[i j c f] and w1[i j f c] with ``shardings``. A strategy adds forward and backward."""

    sample = "b h w c"
    sizes = ("model_dim", "hidden_dim")

    def __init__(self, model_dim: int, hidden_dim: int, mesh: Mesh | None = None, dtype: Any = np.float32) -> None:
        weights = {
            "conv_0/weights": Weight((3, 3, model_dim, hidden_dim), inputs=9 * model_dim),
            "conv_1/weights": Weight((3, 3, hidden_dim, model_dim), inputs=9 * hidden_dim),
        }
        self._store(weights, mesh, dtype)
        self.w0, self.w1 = self.parameters.values()


def conv(x: Array, w: Array, rows: Window | None = None) -> Array:
    """y[b h w f] = sum over i, j, c of x[b h+i-1 w+j-1 c] · w[i j c f], with zeros around the image.

    ``rows``: another window of rows, for a shard of them.
    """
    return rounded(conv2d(x, w, rows or same(), same()), x.dtype)


def conv_input(dy: Array, w: Array, height: int, rows: Window | None = None) -> Array:
    """dx[b h w c] of ``conv``; ``height`` is the size of h."""
    return rounded(conv2d_input_gradient(dy, w, rows or same(), same(), 1, (height, dy.shape[2])), dy.dtype)


def conv_weight(x: Array, dy: Array, rows: Window | None = None) -> Array:
    """dw[i j c f] of ``conv``."""
    return conv2d_weight_gradient(x, dy, rows or same(), same(), 1)


def same() -> Window:
    """The window with as many outputs as inputs."""
    return Window(3, before=1, after=1)
