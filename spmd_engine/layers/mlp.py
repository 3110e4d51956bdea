"""The two-layer perceptron of a transformer block: column-parallel, then row-parallel."""

from spmd_engine.arrays import einsum
from spmd_engine.arrays.activations import gelu, gelu_erf, relu, relu_squared
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.layer import Layer

#: "gelu" is GPT-2's, by a tanh, "gelu-erf" that of the normal distribution.
ACTIVATIONS = {"gelu": gelu, "gelu-erf": gelu_erf, "relu": relu, "relu-squared": relu_squared}


class MLP(Layer):
    """y[b s d] = activation(x[b s d] · w0[d f] + b0[f]) · w1[f d] + b1[d]

    With f cut, the first product is column-parallel (no communication forward), the second row-parallel (its
    sum over f is reduced); backward the other way round. The bias b1 is added once, after the reduction.
    Without ``bias`` there are no b0 and b1.
    """

    may_cut, across = "bsf", "f"

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        std: float = 0.02,
        out_std: float = 0.02,
    ):
        self.sizes, self.bias = {"d": width, "f": hidden}, bias
        self.activation = ACTIVATIONS[activation]
        self.parameters = {
            "w0": Parameter("d f", std=std),
            "b0": Parameter("f", decay=False),
            "w1": Parameter("f d", std=out_std),
            "b1": Parameter("d", decay=False, where="residual"),
        }
        if not bias:
            del self.parameters["b0"], self.parameters["b1"]

    def forward(self, sh, p, x, ctx):
        x = sh.all_gather(x, "b s d", "s", across="f")
        z = einsum("bsd,df->bsf", x, p["w0"])
        if self.bias:
            z += p["b0"]
        h, slope = self.activation(z, want_slope=ctx.training and ctx.saving)
        y = sh.reduce_scatter(einsum("bsf,fd->bsd", h, p["w1"]), "b s d", over="f", onto="s")
        if self.bias:
            y += p["b1"]
        return y, (x, h, slope)

    def backward_input(self, sh, p, saved, dy):
        x, h, slope = saved
        dy_whole = sh.all_gather(dy, "b s d", "s", across="f")
        dz = einsum("bsd,fd->bsf", dy_whole, p["w1"])
        dz *= slope
        dx = sh.start_reduce_scatter(einsum("bsf,df->bsd", dz, p["w0"]), "b s d", over="f", onto="s")
        return dx, (x, h, dz, dy_whole, dy)

    def backward_weight(self, sh, rest, g):
        x, h, dz, dy_whole, dy = rest
        g.einsum("w0", "bsd,bsf->df", x, dz)
        g.einsum("w1", "bsf,bsd->fd", h, dy_whole)
        if self.bias:
            g.einsum("b0", "bsf->f", dz)
            g.einsum("b1", "bsd->d", dy)
