"""The block of a residual network: a branch of convolutions, and a way around it."""

from __future__ import annotations

from spmd_engine.arrays.backend import backend_of
from spmd_engine.errors import UsageError
from spmd_engine.layers.chain import Chain, joined
from spmd_engine.layers.deferred import Deferred, then, wait_for
from spmd_engine.layers.layer import Extra, Layer
from spmd_engine.layers.linear import Linear


class ResidualBlock(Layer):
    """y = max(branch(x) + shortcut(x), 0); without a shortcut, x itself is added

    The parameters stand under ``branch/`` and ``shortcut/``. Where channels are cut inside the ways, both make whole
    ones in the end, so that the sum needs no communication. ``over`` is a letter whose channels the first layers of
    both ways make and, cut, leave their input gradients unreduced over (``reduced=False``): these are added, and then
    reduced at once. Raises UsageError if the ways do not end with the same letters. After He et al., "Deep residual
    learning for image recognition" (2016).
    """

    def __init__(self, branch: Chain, shortcut: Chain | None = None, *, over: str = "") -> None:
        self.ways = {"branch": branch} | ({"shortcut": shortcut} if shortcut else {})
        left, right = branch.outputs, shortcut.outputs if shortcut else branch.inputs
        if left != right:
            raise UsageError(f"ResidualBlock: the branch ends in [{left.dims}], the way around it in [{right.dims}]")
        self.inputs, self.outputs, self.over = branch.inputs, branch.outputs, over
        self.parameters, self.buffers, self.sizes, self.may_cut = joined(self.ways.items())

    def cost(self, length):
        return sum(way.cost(length) for way in self.ways.values())

    def forward(self, sh, p, x, ctx):
        total, saved, updates = None if "shortcut" in self.ways else x, {}, {}
        for name, way in self.ways.items():
            y, saved[name], told = way.forward(sh, p[name], x, ctx)
            updates |= {f"{name}/{own}": update for own, update in told.updates.items()}
            total = y if total is None else total + y
        positive = total > 0 if ctx.training and ctx.saving else None
        return backend_of(total).xp.maximum(total, 0), (saved, positive), Extra(updates)

    def backward_input(self, sh, p, saved, dy):
        saved, positive = saved
        dy, rests, ways = dy * positive, {}, []
        for name, way in self.ways.items():
            dx, rests[name] = way.backward_input(sh, p[name], saved[name], dy)
            ways.append(dx)

        def reduced(dx):
            for other in ways[1:]:
                dx = dx + wait_for(other)
            return sh.start_all_reduce(dx, over=self.over)

        dx = then(ways[0], reduced)
        if "shortcut" not in self.ways:
            dx = then(dx, lambda dx: dx + dy)
        return dx, (rests, dx if isinstance(dx, Deferred) else None)

    def backward_weight(self, sh, rest, g):
        rests, under_way = rest
        for name, way in self.ways.items():
            way.backward_weight(sh, rests[name], g[name])
            if under_way is not None:
                under_way.finish()  # what it reduces travels while the weights of the other way get their gradients


# --- Two dense layers beside a connection that skips them: what makes a thousand layers trainable


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
