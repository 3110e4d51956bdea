"""The gated perceptron of a transformer block (SwiGLU, GeGLU): column-parallel, then row-parallel."""

from spmd_engine.arrays import einsum
from spmd_engine.arrays.activations import gate_of, silu_gate
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.layer import Layer
from spmd_engine.layers.mlp import ACTIVATIONS

GATES = {"silu": silu_gate, **{name: gate_of(activation) for name, activation in ACTIVATIONS.items()}}


class GatedMLP(Layer):
    """y[b s d] = (silu(x[b s d] · gate[d f]) · (x · up[d f])) · down[f d], the product in the middle element by element

    With f cut, gate and up are column-parallel and down is row-parallel, as in the MLP. With ``bias``, each product has
    one, gate_bias[f], up_bias[f] and, after the reduction, down_bias[d]. Another ``activation`` may stand in the place
    of silu, as "gelu", GPT-2's.
    Shazeer, "GLU variants improve transformer" (2020).
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
        self.sizes, self.gate = {"d": width, "f": hidden}, GATES[activation]
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
        z, u = (einsum("bsd,df->bsf", x, p[name]) for name in ("gate", "up"))
        if self.bias:
            z += p["gate_bias"]
            u += p["up_bias"]
        h, slopes = self.gate(z, u, want_slopes=ctx.training and ctx.saving)
        y = sh.reduce_scatter(einsum("bsf,fd->bsd", h, p["down"]), "b s d", over="f", onto="s")
        if self.bias:
            y += p["down_bias"]
        return y, (x, h, slopes)

    def backward_input(self, sh, p, saved, dy):
        x, h, slopes = saved
        dy_whole = sh.all_gather(dy, "b s d", "s", across="f")
        dh = einsum("bsd,fd->bsf", dy_whole, p["down"])
        dz, du = (dh * slope for slope in slopes)
        dx = einsum("bsf,df->bsd", dz, p["gate"])
        dx += einsum("bsf,df->bsd", du, p["up"])
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
