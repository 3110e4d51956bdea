"""Layers one after the other, as one layer: what a block consists of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from spmd_engine.arrays.backend import Array
from spmd_engine.errors import UsageError
from spmd_engine.layers.contract import check_declarations
from spmd_engine.layers.deferred import UNDER_WAY, Deferred, then
from spmd_engine.layers.layer import Extra, Layer, Parameters
from spmd_engine.sharding.shards import Shards


class Chain(Layer):
    """y = last(... second(first(x))), of layers with names, under which their parameters and buffers stand

    While an input gradient travels within it, the gradients of the weights behind it are made.

    Raises UsageError where the letters of one's outputs are not those of the next one's inputs, and for side outputs,
    which are not passed on.
    """

    def __init__(self, *layers: tuple[str, Layer]) -> None:
        self.layers = layers
        for (before, left), (after, right) in zip(layers, layers[1:], strict=False):
            if left.outputs.dims != right.inputs.dims:
                raise UsageError(f"{before} makes [{left.outputs.dims}], and {after} takes [{right.inputs.dims}]")
        if any(layer.side_outputs or layer.tied for _, layer in layers):
            raise UsageError("a Chain passes no side outputs and no tied parameters on")
        self.inputs, self.outputs = layers[0][1].inputs, layers[-1][1].outputs
        self.parameters, self.buffers, self.sizes, self.may_cut = joined(layers)

    def cost(self, length):
        return sum(layer.cost(length) for _, layer in self.layers)

    def forward(self, sh, p, x, ctx):
        saved, updates, decided = [], {}, {}
        for name, layer in self.layers:
            earlier = replace(ctx, decided=ctx.decided[name]) if ctx.decided and name in ctx.decided else ctx
            x, of_layer, *extra = layer.forward(sh, p.get(name, {}), x, earlier)
            saved.append(of_layer)
            for told in extra:
                updates |= {f"{name}/{own}": update for own, update in told.updates.items()}
                decided |= {} if told.decided is None else {name: told.decided}
        return x, saved, Extra(updates, decided=decided or None)

    def backward_input(self, sh, p, saved, dy):
        steps = []
        for name, layer in reversed(self.layers):
            step = _BackwardStep(name, layer, saved.pop())
            dy = step.start(sh, p.get(name, {}), dy)
            steps.append(step)
        return dy, steps

    def backward_weight(self, sh, steps, g):
        while steps:
            step = steps.pop(0)
            step.finish()
            step.layer.backward_weight(sh, step.rest, g[step.name])


class _BackwardStep:
    """One layer's part in the backward of a chain: done at once, or when the gradient comes that it begins with."""

    def __init__(self, name: str, layer: Layer, saved: Any) -> None:
        self.name, self.layer, self.rest, self._saved = name, layer, None, saved
        self._under_way: Deferred | None = None

    def start(self, sh: Shards, p: Parameters, dy: Array | Deferred) -> Array | Deferred:
        """The layer's input gradient, or what it will be once ``dy`` is there."""

        def back(dy: Array) -> Array | Deferred:
            saved, self._saved = self._saved, None
            dx, self.rest = self.layer.backward_input(sh, p, saved, dy)
            return dx

        dx = then(dy, back)
        if isinstance(dy, UNDER_WAY):
            self._under_way = dx
        return dx

    def finish(self) -> None:
        """Wait for ``dy`` if that has not come, not for what this layer sent: its weights' gradients come first."""
        if self._under_way is not None:
            self._under_way.finish()


def joined(layers: Iterable[tuple[str, Layer]]) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, int], str]:
    """What layers with names declare together: parameters and buffers, which say their own shapes; sizes; and the
    letters that may be cut in each layer that has them."""
    parameters, buffers, sizes, may_cut, never = {}, {}, {}, "", ""
    for name, layer in layers:
        check_declarations(layer)
        for what, found in ((layer.parameters, parameters), (layer.buffers, buffers)):
            for own, described in what.items():
                found[f"{name}/{own}"] = replace(described, shape=described.whole(layer.sizes))
        sizes |= layer.sizes
        may_cut += layer.may_cut
        letters = {*layer.inputs.dims.split(), *layer.outputs.dims.split(), *layer.sizes}
        never += "".join(letters.difference(layer.may_cut))
    return parameters, buffers, sizes, "".join(letter for letter in dict.fromkeys(may_cut) if letter not in never)
