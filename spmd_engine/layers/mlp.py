"""The two-layer perceptrons of a transformer block: column-parallel, then row-parallel."""

from collections.abc import Callable, Mapping

from spmd_engine.arrays import einsum
from spmd_engine.arrays.activations import gate_of, gelu, gelu_erf, relu, relu_squared, silu_gate
from spmd_engine.arrays.elementwise import add_to, multiply_by
from spmd_engine.errors import UsageError, one_of
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.layer import Layer

#: "gelu" is the tanh form, as in GPT-2; "gelu-erf" is exact.
ACTIVATIONS = {"gelu": gelu, "gelu-erf": gelu_erf, "relu": relu, "relu-squared": relu_squared}


def _named(activation: str, known: Mapping[str, Callable]) -> Callable:
    if activation not in known:
        raise UsageError(f"unknown activation {activation!r}; {one_of(activation, known)}")
    return known[activation]


class MLP(Layer):
    """y[b s d] = activation(x[b s d] · w0[d f] + b0[f]) · w1[f d] + b1[d]

    With f sharded, the first product is column-parallel (no communication forward), the second row-parallel (its
    sum over f is reduced); in the backward vice versa. The bias b1 is added once, after the reduction.
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
        self.activation = _named(activation, ACTIVATIONS)
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
            add_to(z, p["b0"])
        h, slope = self.activation(z, want_slope=ctx.training and ctx.saving)
        y = sh.reduce_scatter(einsum("bsf,fd->bsd", h, p["w1"]), "b s d", over="f", onto="s")
        if self.bias:
            add_to(y, p["b1"])
        return y, (x, h, slope)

    def backward_input(self, sh, p, saved, dy):
        x, h, slope = saved
        dy_whole = sh.all_gather(dy, "b s d", "s", across="f")
        dz = einsum("bsd,fd->bsf", dy_whole, p["w1"])
        multiply_by(dz, slope)
        dx = sh.start_reduce_scatter(einsum("bsf,df->bsd", dz, p["w0"]), "b s d", over="f", onto="s")
        return dx, (x, h, dz, dy_whole, dy)

    def backward_weight(self, sh, rest, g):
        x, h, dz, dy_whole, dy = rest
        g.einsum("w0", "bsd,bsf->df", x, dz)
        g.einsum("w1", "bsf,bsd->fd", h, dy_whole)
        if self.bias:
            g.einsum("b0", "bsf->f", dz)
            g.einsum("b1", "bsd->d", dy)


# --- The gated perceptron of a transformer block (SwiGLU, GeGLU): column-parallel, then row-parallel


GATES = {"silu": silu_gate, **{name: gate_of(activation) for name, activation in ACTIVATIONS.items()}}


class GatedMLP(Layer):
    """y[b s d] = (silu(x[b s d] · gate[d f]) · (x · up[d f])) · down[f d], with an elementwise product

    With f sharded, gate and up are column-parallel and down is row-parallel, as in the MLP. ``bias`` adds
    gate_bias[f], up_bias[f] and, after the reduction, down_bias[d]. ``activation`` replaces silu, for example by
    "gelu". Shazeer, "GLU variants improve transformer" (2020).
    """

    may_cut, across = "bsf", "f"

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        std: float = 0.02,
        out_std: float = 0.02,
    ):
        self.sizes, self.gate = {"d": width, "f": hidden}, _named(activation, GATES)
        self.parameters = {
            "gate": Parameter("d f", std=std),
            "up": Parameter("d f", std=std),
            "down": Parameter("f d", std=out_std),
        }
        self.bias = bias
        if bias:
            self.parameters |= {f"{name}_bias": Parameter("f", decay=False) for name in ("gate", "up")}
            self.parameters["down_bias"] = Parameter("d", decay=False, where="residual")

    def forward(self, sh, p, x, ctx):
        x = sh.all_gather(x, "b s d", "s", across="f")
        z, u = einsum("bsd,df->bsf", x, p["gate"]), einsum("bsd,df->bsf", x, p["up"])
        if self.bias:
            add_to(z, p["gate_bias"])
            add_to(u, p["up_bias"])
        h, slopes = self.gate(z, u, want_slopes=ctx.training and ctx.saving)
        y = sh.reduce_scatter(einsum("bsf,fd->bsd", h, p["down"]), "b s d", over="f", onto="s")
        if self.bias:
            add_to(y, p["down_bias"])
        return y, (x, h, slopes)

    def backward_input(self, sh, p, saved, dy):
        x, h, slopes = saved
        dy_whole = sh.all_gather(dy, "b s d", "s", across="f")
        dh = einsum("bsd,fd->bsf", dy_whole, p["down"])
        dz, du = (dh * slope for slope in slopes)
        dx = einsum("bsf,df->bsd", dz, p["gate"])
        add_to(dx, einsum("bsf,df->bsd", du, p["up"]))
        dx = sh.start_reduce_scatter(dx, "b s d", over="f", onto="s")
        return dx, (x, h, dz, du, dy_whole, dy)

    def backward_weight(self, sh, rest, g):
        x, h, dz, du, dy_whole, dy = rest
        g.einsum("gate", "bsd,bsf->df", x, dz)
        g.einsum("up", "bsd,bsf->df", x, du)
        g.einsum("down", "bsf,bsd->fd", h, dy_whole)
        if self.bias:
            g.einsum("gate_bias", "bsf->f", dz)
            g.einsum("up_bias", "bsf->f", du)
            g.einsum("down_bias", "bsd->d", dy)
