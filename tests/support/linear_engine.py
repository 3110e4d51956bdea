"""The engine of README.md: one matrix, data parallel; and one of float64 weights."""

import numpy as np

from spmd_engine.engine import ShardedEngine


class Linear(ShardedEngine):
    """y[b f] = x[b d] · w[d f]."""

    input_sharding = output_sharding = "b/data d"

    def load_checkpoint(self, params):
        self.parameters = {"w": self.block("w", params["w"])}

    def forward(self, x):
        self.tape.push(x)
        return x @ self.parameters["w"]

    def backward(self, dy):
        return {"w": self.all_reduce(self.tape.pop().T @ dy, over="data")}


class Drawn(Linear):
    """An engine as docs/engines.md shows one, from draws that NumPy makes in float64."""

    drawn = np.float64

    def __init__(self):
        self.load_checkpoint({"w": np.random.default_rng(0).standard_normal((3, 2)).astype(self.drawn)})
