"""A layer of one's own, a causal convolution along the sequence, in a model for the command line:

python -m spmd_engine analyze --model examples/own_layer.py:model --mesh context=2,data=2
python -m spmd_engine show sharding --model examples/own_layer.py:model --param block0/taps/w --mesh data=2
python -m spmd_engine plan --model examples/own_layer.py:model --set width=64 --ranks 4 --seconds 1
mpiexec -n 2 python -m spmd_engine verify --model examples/own_layer.py:model --mesh context=2 --batch-size 4
mpiexec -n 2 python -m spmd_engine train --model examples/own_layer.py:model --data examples --steps 20 --run runs/own
python -m spmd_engine generate --run runs/own --model examples/own_layer.py:model --prompt "import " --tokens 20
"""

import numpy as np

from spmd_engine.layers import MLP, Embedding, Head, Layer, LayerNorm, Parameter, Residual, Window
from spmd_engine.models import Model, token_loss


class CausalConvolution(Layer):
    """y[b s d] = sum over taps t of x[b s-2+t d] * w[t d]: the positions s-2, s-1 and s."""

    may_cut, taps = "bs", 3

    def __init__(self, width):
        self.sizes = {"t": self.taps, "d": width}
        self.parameters = {"w": Parameter("t d", std=0.3, where="residual")}

    def reads(self, length):
        return {"s": (length, Window(self.taps, before=self.taps - 1))}

    def forward(self, sh, p, x, ctx):
        reads = self.reads(ctx.length)
        first, _ = sh.reach("s", *reads["s"], where="residual").outputs
        missing = max(self.taps - 1 - first, 0)  # padding only at the start of the sequence
        wide = np.pad(sh.with_halo(x, "b s d", reads, where="residual"), ((0, 0), (missing, 0), (0, 0)))
        return sum(wide[:, t : t + x.shape[1]] * p["w"][t] for t in range(self.taps)), (wide, missing, reads)

    def backward_input(self, sh, p, saved, dy):
        wide, missing, reads = saved
        dwide = np.zeros_like(wide)
        for t in range(self.taps):
            dwide[:, t : t + dy.shape[1]] += dy * p["w"][t]
        return sh.add_halo(dwide[:, missing:], "b s d", reads, where="residual"), (wide, dy)

    def backward_weight(self, sh, rest, g):
        wide, dy = rest
        g.add("w", np.stack([(wide[:, t : t + dy.shape[1]] * dy).sum((0, 1)) for t in range(self.taps)]))


def model(width=24, blocks=2, context=32):
    """Bytes[b s] to scores[b s v] of the next byte; ``--set width=64`` gives an argument."""
    layers = [("embedding", Embedding(257, width))]
    for block in range(blocks):
        layers.append((f"block{block}/taps", Residual(LayerNorm(width), CausalConvolution(width))))
        layers.append((f"block{block}/mlp", Residual(LayerNorm(width), MLP(width, 4 * width))))
    layers.append(("head", Head(257, width)))
    return Model("taps", tuple(layers), "b s", "b s v", "b s", token_loss(257), context=context, vocabulary=257)
