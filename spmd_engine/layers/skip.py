"""Two dense layers beside a connection that skips them: what makes a thousand layers trainable."""

from __future__ import annotations

from spmd_engine.errors import UsageError
from spmd_engine.layers.later import then, wait_for
from spmd_engine.layers.layer import Layer
from spmd_engine.layers.linear import Linear


class Skip(Layer):
    """y[b d] = x[b d] + down(up(x[b d])), with up: d -> f and down: f -> d in the layers' own letters

    What comes in and what is added to it are cut alike, so their sum needs no communication. The parameters
    stand under ``up/`` and ``down/``. Raises UsageError for two layers that do not fit. After He et al.,
    "Identity mappings in deep residual networks" (2016).
    """

    def __init__(self, up: Linear, down: Linear) -> None:
        for before, after in ((up, down), (down, up)):
            out, into = before.letters[1], after.letters[0]
            left = out, before.sizes[out], before.gather_output
            right = into, after.sizes[into], after.slice_input
            if left != right:
                meet = f"output (letter, size, gathered) {left} meets input (letter, size, sliced) {right}"
                raise UsageError(f"Skip: {meet}; they must be alike")
        self.up, self.down = up, down
        self.inputs, self.outputs = up.inputs, down.outputs
        self.sizes, self.may_cut = up.sizes, up.may_cut
        self.parameters = {f"up/{name}": parameter for name, parameter in up.parameters.items()}
        self.parameters |= {f"down/{name}": parameter for name, parameter in down.parameters.items()}

    def forward(self, sh, p, x, ctx):
        z, from_up = self.up.forward(sh, p["up"], x, ctx)
        y, from_down = self.down.forward(sh, p["down"], z, ctx)
        return x + y, (from_up, from_down)

    def backward_input(self, sh, p, saved, dy):
        from_up, from_down = saved
        dz, down_rest = self.down.backward_input(sh, p["down"], from_down, dy)
        dx, up_rest = self.up.backward_input(sh, p["up"], from_up, wait_for(dz))
        return then(dx, lambda dx: dx + dy), (up_rest, down_rest)

    def backward_weight(self, sh, rest, g):
        up_rest, down_rest = rest
        self.down.backward_weight(sh, down_rest, g["down"])
        self.up.backward_weight(sh, up_rest, g["up"])
