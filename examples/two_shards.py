"""A classifier of stripes in two pipeline stages: one rank detects features, the other classifies; memory is freed.

mpiexec -n 2 python examples/two_shards.py
"""

import tracemalloc

import numpy as np

from spmd_engine import Mesh
from spmd_engine.arrays.images import conv2d, max_pool
from spmd_engine.arrays.windows import Window

RIDGE = np.array([[-1, 2, -1]] * 3, np.float32)  # the middle column against its neighbours
KERNELS = np.stack([RIDGE, RIDGE.T], axis=-1)[:, :, None]  # [k l i f]: one input channel, two features


def draw(count, seed):
    """Images[b h w c] of noisy stripes, and their classes: 0 vertical, 1 horizontal."""
    rng = np.random.default_rng(seed)
    stripes = (np.indices((64, 64))[::-1, ..., None] // 2 % 2).astype(np.float32)
    names = rng.integers(0, 2, count)
    return stripes[names] + rng.normal(0, 0.5, (count, 64, 64, 1)).astype(np.float32), names


def detect(images):
    """The first stage, features[b p q f]: a convolution, ReLU, and 4 x 4 max pooling."""
    return max_pool(np.maximum(conv2d(images, KERNELS, Window(3), Window(3)), 0), Window(4, 4), Window(4, 4))[0]


def classify(features):
    """The second stage, classes[b]: the feature with the largest mean."""
    return features.mean(axis=(1, 2)).argmax(axis=-1)


def main(batches=3, size=100):
    tracemalloc.start()
    with Mesh(pipe=2) as mesh:
        for batch in range(batches):
            before = tracemalloc.get_traced_memory()[0]
            images, names = draw(size, batch)
            if mesh.rank == 0:
                features = detect(images)
                mesh.send(1, features, over="pipe")
            else:
                features = mesh.receive(0, over="pipe")
                print(f"batch {batch}: {(classify(features) == names).mean():.0%} right")
            held = features.nbytes
            del features, images, names  # they were sent or used
            remaining = tracemalloc.get_traced_memory()[0] - before
            if batch:  # the first batch also loads code
                print(f"rank {mesh.rank} held {held:,} bytes of features; of this batch it keeps {remaining:,}")


if __name__ == "__main__":
    main()
