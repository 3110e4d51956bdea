"""Shared by the two workers of a convolution: the arrays, and the loss.

In addition to `warmup`, `steps`, `block`, `seed` and `threads` (see `peers_protocol.py`), a configuration has

    convolution    batch, length (of rows and columns), inputs and outputs (channels), kernel, stride, padding,
                   and whether the gradient of the input is computed, which a first layer does not need

A step is the convolution and its gradients for one dy. Its loss is the mean absolute value of the weights' gradient, so
that sides can be compared. Its time is CPU time: with one rank and one thread that equals the wall time on an idle
machine.
"""

import numpy as np


def make_arrays(config):
    """x[b h w c], w[k l i f], dy[b p q f]: standard normals in float32."""
    of, random = config["convolution"], np.random.default_rng(config["seed"])
    outputs = (of["length"] + 2 * of["padding"] - of["kernel"]) // of["stride"] + 1
    shapes = (
        (of["batch"], of["length"], of["length"], of["inputs"]),
        (of["kernel"], of["kernel"], of["inputs"], of["outputs"]),
        (of["batch"], outputs, outputs, of["outputs"]),
    )
    return [random.standard_normal(shape, np.float32) for shape in shapes]
