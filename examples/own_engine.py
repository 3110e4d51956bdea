"""A model of your own: a bigram language model, its vocabulary sharded over ``model`` and its batch over ``data``.

    mpiexec -n 4 python examples/own_engine.py

logits[b/data s v/model] = first[v d] at v = token · second[d v/model], cross-entropy, AdamW. Three methods
make it an engine; the package's data, trainer, optimizer, ledger and checkpoint then work with it.
"""

import sys
from functools import partial

import numpy as np

from spmd_engine import Mesh, world
from spmd_engine.arrays import einsum
from spmd_engine.arrays.random import key_of, normal
from spmd_engine.arrays.scatter import add_rows
from spmd_engine.checkpoints import save_checkpoint
from spmd_engine.engine import AdamW, ShardedEngine
from spmd_engine.losses import cross_entropy
from spmd_engine.training import Trainer, load_corpus

VOCABULARY, WIDTH, CONTEXT = 257, 64, 64


class Bigram(ShardedEngine):
    """Predicts the next byte from only the last byte."""

    shardings = {"first": "v d", "second": "d v/model"}
    input_sharding, output_sharding, target_sharding = "b/data s", "b/data s v/model", "b/data s"

    def __init__(self, mesh, seed=0):
        self.mesh = mesh
        shapes = {"first": (VOCABULARY, WIDTH), "second": (WIDTH, VOCABULARY)}
        parameters = {name: 0.1 * normal(key_of(seed, name), shape, np.float32) for name, shape in shapes.items()}
        self.load_checkpoint(parameters)

    def load_checkpoint(self, params):
        self.parameters = {name: self.block(name, params[name]) for name in self.shardings}

    def forward(self, tokens):
        x = self.parameters["first"][tokens]
        self.tape.push(tokens, x)
        return einsum("bsd,dv->bsv", x, self.parameters["second"])

    def backward(self, dlogits):
        tokens, x = self.tape.pop()
        dx = einsum("bsv,dv->bsd", dlogits, self.parameters["second"])
        dx = self.all_reduce(dx, over="model")  # v is sharded: each rank has summed its part of v
        second = self.all_reduce(einsum("bsd,bsv->dv", x, dlogits), over="data")  # b is sharded
        first = np.zeros_like(self.parameters["first"])
        add_rows(first, tokens.reshape(-1), dx.reshape(-1, WIDTH))
        return {"first": self.all_reduce(first, over="data"), "second": second}


def main(steps=200, batch_size=32):
    ranks = world().size
    model = 2 if ranks % 2 == 0 else 1
    with Mesh(data=ranks // model, model=model) as mesh:
        engine = Bigram(mesh)
        data = load_corpus(mesh.group(), None, CONTEXT).windows(CONTEXT, seed=0)
        start = engine.sharding("second").block((WIDTH, VOCABULARY), mesh)[1].start
        loss = partial(cross_entropy, over=mesh.group("model"), start=start)

        def batches(step):
            return data.batch(engine, step, size=batch_size)

        trainer = Trainer(engine, AdamW(), batches, rate=lambda step: 1e-2, grad_clip=1.0, loss=loss)
        for report in trainer.run(steps):
            if mesh.rank == 0 and report.step % 50 == 0:
                print(f"step {report.step}: loss {report.loss:.3f}, {report.tokens_per_second:,.0f} tokens/s")
        save_checkpoint("runs/bigram", engine, trainer.optimizer, step=steps)
        if mesh.rank == 0:
            print(mesh.ledger)
        return trainer.evaluate([batches(steps)])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
