"""What the two workers of a network on images share: its data, and what a step is.

Beside `warmup`, `steps`, `block`, `seed` and `threads`, see `peers_protocol.py`, a configuration has

    images            length (of rows and columns), channels, classes
    batch_size, learning_rate, momentum

A step is one of SGD on the same images each time, of a ResNet-18 (He et al., 2016) with a stem of 7 x 7 at stride 2 and
maxima of 3 x 3. Its seconds are those of the processor, as of a convolution. Parameters are each side's own draw of the
same distribution, or nearly: losses are alike, not equal.
"""

import numpy as np


def make_images(config):
    """x[b h w c], standard normals in float32, and targets[b]."""
    of, random = config["images"], np.random.default_rng(config["seed"])
    shape = config["batch_size"], of["length"], of["length"], of["channels"]
    return random.standard_normal(shape, np.float32), random.integers(0, of["classes"], config["batch_size"])
