"""Shared by the two workers of an image network: its data, and the definition of a step.

In addition to `warmup`, `steps`, `block`, `seed` and `threads` (see `peers_protocol.py`), a configuration has

    images            length (of rows and columns), channels, classes
    batch_size, learning_rate, momentum

A step is an SGD step on the same images each time, of a ResNet-18 (He et al., 2016) with a 7 x 7 stem at stride 2 and 3
x 3 max pooling. Its time is CPU time, as for a convolution. Each side draws its own initial parameters from nearly the
same distribution, so losses are similar, not equal.
"""

import numpy as np


def make_images(config):
    """x[b h w c], standard normals in float32, and targets[b]."""
    of, random = config["images"], np.random.default_rng(config["seed"])
    shape = config["batch_size"], of["length"], of["length"], of["channels"]
    return random.standard_normal(shape, np.float32), random.integers(0, of["classes"], config["batch_size"])
