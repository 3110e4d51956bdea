"""Dense feed-forward models: the letters of layers alternate, so that a layout can shard any of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from spmd_engine.errors import UsageError
from spmd_engine.layers import Linear, Skip
from spmd_engine.losses import mean_squared_error
from spmd_engine.models.model import Model, class_accuracy, class_loss


def mlp(
    sizes: Sequence[int] = (784, 128, 127, 10),
    name: str = "mlp",
    *,
    activation: str = "relu",
    whole_between: bool = False,
) -> Model:
    """x[b d] to scores[b c] of classes, by cross-entropy with targets[b]; the activation is between layers.

    Widths have the letters d, f, d, f, ..., and the classes c. With f sharded over an axis, layers are alternately
    column-parallel and row-parallel; with d sharded over a second axis, weights are sharded on a 2-D mesh. With
    ``whole_between`` every layer is d -> f and replicated between layers: with f sharded, all layers are
    column-parallel and outputs are gathered. The gradient of the inputs, which are data, is not computed. Raises
    UsageError for fewer than two sizes.
    """
    if len(sizes) < 2:
        raise UsageError(f"{name}: sizes {tuple(sizes)}; give those of the inputs and of the classes at least")
    layers = []
    last = len(sizes) - 2
    for k in range(last + 1):
        i, o = ("d", "f") if whole_between or k % 2 == 0 else ("f", "d")
        layer = Linear(
            (i, sizes[k]),
            (o if k < last else "c", sizes[k + 1]),
            activation=activation if k < last else None,
            slice_input=whole_between and k > 0,
            gather_output=whole_between and k < last,
            input_gradient=k > 0,
        )
        layers.append((f"layer_{k}", layer))
    loss, metrics = class_loss("c", sizes[-1]), {"accuracy": class_accuracy("c", sizes[-1])}
    return Model(name, tuple(layers), "b d", "b c", "b", loss, metrics=metrics)


def two_layers(width: int = 64, hidden: int = 256, name: str = "two-layers") -> Model:
    """y[b d] = relu(x[b d] · w0[d f]) · w1[f d] by the mean squared error: the model of the files in ``strategies``.

    Parameters have the same names as in these files.
    """
    up = Linear(("d", width), ("f", hidden), activation="relu", bias=False, std=1 / sqrt(width))
    down = Linear(("f", hidden), ("d", width), bias=False)
    return Model(name, (("layer_0", up), ("layer_1", down)), "b d", "b d", "b d", mean_squared_error)


def deep_mlp(layers: int = 1000, width: int = 64, name: str = "deep-mlp") -> Model:
    """x[b d] to y[b d] by the mean squared error, through pairs of dense layers d -> f -> d with skip connections.

    The model has thousands of small parameters. Each pair adds little initially, so that signals and gradients keep
    their size at any depth. Raises UsageError for an odd number of layers.
    """
    if layers < 2 or layers % 2:
        raise UsageError(f"{name}: {layers} layers; they come in pairs")
    pairs = layers // 2
    blocks = []
    for k in range(pairs):
        up = Linear(("d", width), ("f", width), activation="relu")
        blocks.append((f"block{k}/pair", Skip(up, Linear(("f", width), ("d", width), std=1 / sqrt(width * pairs)))))
    return Model(name, tuple(blocks), "b d", "b d", "b d", mean_squared_error)
