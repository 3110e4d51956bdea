"""Layers of one's own with buffers, side outputs and letters of images, in two small models."""

import numpy as np

from spmd_engine.arrays import einsum
from spmd_engine.arrays.windows import Window
from spmd_engine.layers import (
    MLP,
    Activation,
    Buffer,
    Embedding,
    Extra,
    Head,
    Layer,
    LayerNorm,
    Parameter,
    Residual,
    SideOutput,
)
from spmd_engine.losses import mean_squared_error
from spmd_engine.models import Model
from spmd_engine.models.decoder import token_loss

D, F, V, LENGTH, BATCH = 6, 10, 13, 7, 9


class Centred(Layer):
    """y[b s d] = (x - mean) · scale[d], the mean over the whole micro-batch; in evaluation, the running one.

    A loss: the mean's square. A count: how often each d was positive.
    """

    def __init__(self):
        self.sizes = {"d": D}
        self.parameters = {"scale": Parameter("d", mean=1.0, where="residual")}
        self.buffers = {
            "running": Buffer("d", lambda old, mean: 0.9 * old + 0.1 * mean),
            "seen": Buffer("d", lambda old, new: old / 2 + new, per_step=True, summed="bs", where="residual"),
        }
        self.side_outputs = {
            "size": SideOutput(loss=True),
            "positive": SideOutput("d", summed="bs", where="residual"),
        }

    def forward(self, sh, p, x, ctx):
        if not ctx.training:
            return (x - p["running"]) * p["scale"], None
        sums = sh.all_reduce(np.append(x.sum((0, 1)), x.shape[0] * x.shape[1]), over="bs", where="residual")
        mean, count = sums[:-1] / sums[-1], sums[-1]
        positive = (x > 0).sum((0, 1)).astype(x.dtype)
        told = Extra({"running": mean, "seen": positive}, {"size": (mean**2).sum(), "positive": positive})
        return (x - mean) * p["scale"], (x - mean, mean, count), told

    def backward_input(self, sh, p, saved, dy, side):
        centred, mean, count = saved
        dx = dy * p["scale"]
        dmean = -sh.all_reduce(dx.sum((0, 1)), over="bs", where="residual") + 2 * side["size"] * mean
        return dx + dmean / count, (centred, dy)

    def backward_weight(self, sh, rest, g):
        g.einsum("scale", "bsd,bsd->d", *rest)


def text_model():
    layers = [("embedding", Embedding(V, D, std=0.5))]
    for i in range(2):
        layers.append((f"block{i}/centred", Residual(LayerNorm(D), Centred())))
        layers.append((f"block{i}/mlp", Residual(LayerNorm(D), MLP(D, F, std=0.3))))
    layers.append(("head", Head(V, D, std=0.5)))
    return Model("toy", tuple(layers), "b s", "b s v", "b s", token_loss(V), LENGTH, V)


def tokens(step):
    rows = np.random.default_rng(step).integers(0, V, (BATCH, LENGTH + 1))
    return rows[:, :-1], rows[:, 1:]


class Pointwise(Layer):
    """y[b h w o] = x[b h w c] · weights[c o]: a 1 x 1 convolution, with any of its letters cut."""

    may_cut = "bhwco"
    inputs, outputs = Activation("b h w c"), Activation("b h w o")

    def __init__(self, into, out, turned=False):
        if turned:
            self.inputs, self.outputs = self.outputs, self.inputs
        self.i, self.o = ("o", "c") if turned else ("c", "o")
        self.sizes = {self.i: into, self.o: out}
        self.parameters = {"weights": Parameter(f"{self.i} {self.o}", std=0.5, summed="bhw")}

    def forward(self, sh, p, x, ctx):
        y = einsum(f"bhw{self.i},{self.i}{self.o}->bhw{self.o}", x, p["weights"])
        return sh.all_reduce(y, over=self.i), x

    def backward_input(self, sh, p, x, dy):
        dx = einsum(f"bhw{self.o},{self.i}{self.o}->bhw{self.i}", dy, p["weights"])
        return sh.start_all_reduce(dx, over=self.o), (x, dy)

    def backward_weight(self, sh, rest, g):
        g.einsum("weights", f"bhw{self.i},bhw{self.o}->{self.i}{self.o}", *rest)


class Blur(Layer):
    """y[b h w c] = sum over j of weights[j c] · x[b h+j-1 w c]: rows overlap, also those of other ranks; 0 beyond."""

    may_cut = "bhwco"

    def __init__(self, height, channels, letter="c"):
        self.height, self.letters = height, letter
        self.inputs = self.outputs = Activation(f"b h w {letter}")
        self.sizes = {"j": 3, letter: channels}
        self.parameters = {"weights": Parameter(f"j {letter}", std=0.5, summed="bhw")}

    def halo(self, sh):
        return f"b h w {self.letters}", {"h": (self.height, Window(3, before=1, after=1))}

    def padded(self, sh, x):
        """x with a row of zeros at the image's border."""
        part = sh.span("h", self.height)
        ends = int(part.start == 0), int(part.stop == self.height)
        return np.pad(x, ((0, 0), ends, (0, 0), (0, 0))), ends

    def forward(self, sh, p, x, ctx):
        rows = x.shape[1]
        x, ends = self.padded(sh, sh.with_halo(x, *self.halo(sh)))
        return sum(x[:, j : j + rows] * p["weights"][j] for j in range(3)), (x, ends)

    def backward_input(self, sh, p, saved, dy):
        x, ends = saved
        rows, dx = dy.shape[1], np.zeros_like(x)
        for j in range(3):
            dx[:, j : j + rows] += dy * p["weights"][j]
        return sh.add_halo(dx[:, ends[0] : len(dx[0]) - ends[1]].copy(), *self.halo(sh)), (x, dy)

    def backward_weight(self, sh, rest, g):
        x, dy = rest
        g.add("weights", np.stack([(x[:, j : j + dy.shape[1]] * dy).sum((0, 1, 2)) for j in range(3)]))


HEIGHT, WIDTH, CHANNELS = 5, 4, 6


def image_model():
    sizes = [(CHANNELS, 8), (8, CHANNELS), (CHANNELS, 5), (5, CHANNELS)]
    layers = [(f"block{k // 2}/layer{k}", Pointwise(*size, turned=k % 2 == 1)) for k, size in enumerate(sizes)]
    layers.insert(2, ("block0/blur", Blur(HEIGHT, CHANNELS)))
    layers.insert(4, ("block1/blur", Blur(HEIGHT, 5, "o")))
    return Model("images", tuple(layers), "b h w c", "b h w c", "b h w c", mean_squared_error)


def images(step):
    rng = np.random.default_rng(step)
    return tuple(rng.standard_normal((BATCH, HEIGHT, WIDTH, CHANNELS)) for _ in range(2))
