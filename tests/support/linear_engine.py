"""The engine of README.md: one matrix, data parallel."""

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
