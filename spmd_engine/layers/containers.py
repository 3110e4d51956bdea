"""Layers made of layers: chains, residual branches and blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from spmd_engine.arrays.activations import relu
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.elementwise import add_to, kept_where, plus
from spmd_engine.arrays.precision import scaled
from spmd_engine.arrays.random import bernoulli, key_of
from spmd_engine.comm.pending import UNDER_WAY, Deferred, then, wait_for
from spmd_engine.errors import UsageError
from spmd_engine.layers.contract import check_declarations, check_sizes
from spmd_engine.layers.layer import Extra, Layer, Parameters
from spmd_engine.layers.linear import Linear
from spmd_engine.sharding.shards import Shards

Inner = Annotated[Layer, "a layer; Chain joins several"]


class Dropout(Layer):
    """y = x · mask / (1 - rate): the mask depends only on seed, step, name and global index."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def forward(self, sh, p, x, ctx):
        if not (self.rate and ctx.training):
            return x, None
        backend = backend_of(x)
        # A row's number must be the same on every mesh, so it may not depend on this micro-batch's length.
        assert ctx.samples is not None
        rows = ctx.samples[:, None] * (1 << 24) + ctx.residual_positions[None, :]
        key = key_of(ctx.seed, "dropout", ctx.step, sh.label)
        mask = bernoulli(key, 1.0 - self.rate, rows, x.shape[-1], backend)
        return self._kept(mask, x), mask

    def backward_input(self, sh, p, mask, dy):
        return (dy if mask is None else self._kept(mask, dy)), None

    def _kept(self, mask, x):
        y = x * mask
        y *= x.dtype.type(1.0 / (1.0 - self.rate))
        return y


class Scale(Layer):
    """y = factor · x"""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def forward(self, sh, p, x, ctx):
        return scaled(x, self.factor), None

    def backward_input(self, sh, p, saved, dy):
        return scaled(dy, self.factor), None


# --- A sequence of layers as one layer


class Chain(Layer):
    """y = last(... second(first(x))); subclasses with ``adds_input`` add x

    The names of parameters and buffers begin with that of their layer.

    While an input gradient is under way, the weight gradients of later layers are computed.

    Raises UsageError if the output letters of a layer differ from the input letters of the next, and for side outputs
    and tied parameters, which are not passed on. (Subclasses may have one layer with side outputs. Its name is "", and
    its parameters, buffers and side outputs keep their names.)
    """

    adds_input = False

    def __init__(self, *layers: tuple[str, Layer]) -> None:
        if not layers or not all(isinstance(x, tuple) and hasattr(x[-1], "backward_input") for x in layers):
            raise UsageError('Chain: give pairs of a name and a layer, as in Chain(("first", one), ("second", other))')
        self.layers = layers
        for (before, left), (after, right) in zip(layers, layers[1:], strict=False):
            if left.outputs.dims != right.inputs.dims:
                raise UsageError(f"{before} makes [{left.outputs.dims}], and {after} takes [{right.inputs.dims}]")
        check_sizes(layers)
        if any(layer.side_outputs or layer.tied for _, layer in layers):
            raise UsageError("a Chain passes no side outputs and no tied parameters on")
        self.inputs, self.outputs = layers[0][1].inputs, layers[-1][1].outputs
        self.parameters, self.buffers, self.sizes, self.may_cut = joined(layers)

    @property
    def input_sizes(self):
        return self.layers[0][1].input_sizes

    @property
    def output_sizes(self):
        return self.layers[-1][1].output_sizes

    def cost(self, length):
        return sum(layer.cost(length) for _, layer in self.layers)

    def forward(self, sh, p, x, ctx):
        saved, extras, decided = [], {}, ctx.decided
        given = x if self.adds_input else None
        for name, layer in self.layers:
            earlier = replace(ctx, decided=decided[name]) if decided and name in decided else ctx
            result = layer.forward(sh, p.get(name, {}) if name else p, x, earlier)
            x = result[0]
            if ctx.training:
                saved.append(result[1])
            if len(result) > 2:
                extras[name] = result[2]
        if given is not None:
            x = plus(given, x)
        return (x, saved, _joined_extra(extras)) if extras else (x, saved)

    def backward_input(self, sh, p, saved, dy, *side):
        steps, given = [], dy if self.adds_input else None
        for name, layer in reversed(self.layers):
            step = _BackwardStep(name, layer, saved.pop())
            dy = step.start(sh, p.get(name, {}) if name else p, dy, *side if layer.side_outputs else ())
            steps.append(step)
        if given is not None:
            dy = then(dy, lambda dx: add_to(dx, given))
        return dy, (steps, dy if given is not None and isinstance(dy, Deferred) else None)

    def backward_weight(self, sh, rest, g):
        steps, under_way = rest
        while steps:
            step = steps.pop(0)
            step.finish()
            step.layer.backward_weight(sh, step.rest, g[step.name] if step.name else g)
        if under_way is not None:
            under_way.finish()  # the first layer has waited for it already: add dy now and free it


def _full_name(layer: str, key: str) -> str:
    """The name in a chain of a parameter or buffer of one of its layers."""
    return f"{layer}/{key}" if layer else key


def _joined_extra(extras: Mapping[str, Extra]) -> Extra:
    """What layers returned, by their names, as returned by all of them together."""
    updates = {_full_name(name, key): x for name, extra in extras.items() for key, x in extra.updates.items()}
    outputs = {key: x for extra in extras.values() for key, x in extra.outputs.items()}
    decided = {name: extra.decided for name, extra in extras.items() if extra.decided is not None}
    return Extra(updates, outputs, decided or None)


class _BackwardStep:
    """The backward of one layer in a chain. It runs at once, or when its output gradient has arrived."""

    def __init__(self, name: str, layer: Layer, saved: Any) -> None:
        self.name, self.layer, self.rest, self._saved = name, layer, None, saved
        self._under_way: Deferred | None = None

    def start(self, sh: Shards, p: Parameters, dy: Array | Deferred, *side: Mapping[str, float]) -> Array | Deferred:
        """The layer's input gradient; deferred if ``dy`` is under way."""

        def back(dy: Array) -> Array | Deferred:
            saved, self._saved = self._saved, None
            dx, self.rest = self.layer.backward_input(sh, p, saved, dy, *side)
            return dx

        dx = then(dy, back)
        if isinstance(dy, UNDER_WAY):
            self._under_way = dx
        return dx

    def finish(self) -> None:
        """Wait for ``dy``, but not for this layer's own communication: its weight gradients come first."""
        if self._under_way is not None:
            self._under_way.finish()


def joined(layers: Iterable[tuple[str, Layer]]) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, int], str]:
    """The union of the layers' declarations: parameters and buffers with their own shapes, sizes, and the letters that
    may be sharded in every layer that has them."""
    parameters, buffers, sizes, may_cut, never = {}, {}, {}, "", ""
    for name, layer in layers:
        check_declarations(layer)
        for declared, result in ((layer.parameters, parameters), (layer.buffers, buffers)):
            for key, declaration in declared.items():
                result[_full_name(name, key)] = replace(declaration, shape=declaration.whole(layer.sizes))
        sizes |= layer.sizes
        may_cut += layer.may_cut
        letters = {*layer.inputs.dims.split(), *layer.outputs.dims.split(), *layer.sizes}
        never += "".join(letters.difference(layer.may_cut))
    return parameters, buffers, sizes, "".join(letter for letter in dict.fromkeys(may_cut) if letter not in never)


# --- Branches of the residual stream: inner(norm(x)), perhaps normalized and scaled, is added to the stream


class Branch(Chain):
    """y[b s d] = scale · after(inner(norm(x[b s d]))); both norms are optional

    The inner layer's parameters, buffers and side outputs keep their names; the names of the norms' parameters begin
    with ``norm/`` and ``norm_after/``.
    """

    def __init__(self, norm: Layer | None, inner: Inner, *, after: Layer | None = None, scale: float = 1.0):
        check_declarations(inner)
        self.inner = inner
        layers = ("norm", norm), ("", inner), ("norm_after", after), ("scale", Scale(scale) if scale != 1 else None)
        self.layers = tuple((name, layer) for name, layer in layers if layer is not None)
        check_sizes(self.layers)
        self.may_cut, self.across, self.attends = inner.may_cut, inner.across, inner.attends
        self.parameters, _, self.sizes, _ = joined(self.layers)
        self.buffers, self.side_outputs = dict(inner.buffers), dict(inner.side_outputs)

    def cost(self, length):
        return self.inner.cost(length)


class Residual(Branch):
    """y[b s d] = x + dropout(scale · after(inner(norm(x)))), with the names of ``Branch``"""

    adds_input = True

    def __init__(
        self, norm: Layer | None, inner: Inner, dropout: float = 0.0, *, after: Layer | None = None, scale: float = 1.0
    ):
        super().__init__(norm, inner, after=after, scale=scale)
        self.dropout = Dropout(dropout)
        if dropout:
            self.layers += (("dropout", self.dropout),)


class Parallel(Residual):
    """y[b s d] = x + dropout(Σ_i branch_i(z)), with z = norm(x), or x without a ``norm``

    All branches have the same input (Wang and Komatsuzaki, "GPT-J-6B", 2021). The names of parameters begin with that
    of their branch, or with ``norm/``. While one branch's input gradient is under way, the next one is computed.
    Raises UsageError for side outputs, which are not passed on.
    """

    def __init__(self, *branches: tuple[str, Layer], norm: Layer | None = None, dropout: float = 0.0) -> None:
        if any(branch.side_outputs for _, branch in branches):
            raise UsageError("a Parallel passes no side outputs on")
        super().__init__(norm, _Sum(branches), dropout)
        self.branches, self.norm = branches, norm
        named_layers = [*branches, *([("norm", norm)] if norm is not None else [])]
        self.parameters, self.buffers, self.sizes, _ = joined(named_layers)

    @property
    def side_by_side(self):
        return tuple(branch for _, branch in self.branches)

    def changed(self, do: Callable[[Layer], Layer]) -> Parallel:
        """A Parallel with ``do`` applied to each branch and to the norm."""
        norm = None if self.norm is None else do(self.norm)
        return Parallel(*((name, do(branch)) for name, branch in self.branches), norm=norm, dropout=self.dropout.rate)


class _Sum(Layer):
    """y[b s d] = Σ_i branch_i(x); the names of parameters begin with that of their branch"""

    def __init__(self, branches: Sequence[tuple[str, Layer]]) -> None:
        self.branches = branches
        self.attends = any(branch.attends for _, branch in branches)
        self.parameters, self.buffers, self.sizes, _ = joined(branches)
        self.may_cut = "".join(dict.fromkeys("".join(branch.may_cut for _, branch in branches)))

    def cost(self, length):
        return sum(branch.cost(length) for _, branch in self.branches)

    def forward(self, sh, p, x, ctx):
        total, saved = None, []
        for name, branch in self.branches:
            y, branch_saved = branch.forward(sh, p[name], x, ctx)
            total = y if total is None else add_to(total, y)
            saved.append(branch_saved)
        return total, saved

    def backward_input(self, sh, p, saved, dy):
        parts, rests = [], []
        for (name, branch), branch_saved in zip(self.branches, saved, strict=True):
            part, rest = branch.backward_input(sh, p[name], branch_saved, dy)
            parts.append(part)
            rests.append(rest)

        def together(dx):
            for part in parts[:-1]:
                dx = add_to(dx, wait_for(part))
            return dx

        return then(parts[-1], together), rests

    def backward_weight(self, sh, rests, g):
        for (name, branch), rest in zip(self.branches, rests, strict=True):
            branch.backward_weight(sh, rest, g[name])


# --- The block of a residual network: a branch of convolutions and its shortcut


class ResidualBlock(Layer):
    """y = max(branch(x) + shortcut(x), 0); without a shortcut, x itself is added

    The names of parameters begin with ``branch/`` and ``shortcut/``. If channels are sharded inside the two, both
    return all channels, so that the sum needs no communication. ``over`` is the letter of the output channels of their
    first layers: if it is sharded, these leave their input gradients unreduced over it (``reduced=False``), and the sum
    of the gradients is reduced once. Raises UsageError if the output letters of the two differ. After He et al.,
    "Deep residual learning for image recognition" (2016).
    """

    def __init__(self, branch: Layer, shortcut: Layer | None = None, *, over: str = "") -> None:
        self.paths = {"branch": branch} | ({"shortcut": shortcut} if shortcut else {})
        left, right = branch.outputs, shortcut.outputs if shortcut else branch.inputs
        if left != right:
            raise UsageError(f"ResidualBlock: the branch returns [{left.dims}], but its shortcut [{right.dims}]")
        self.inputs, self.outputs, self.over = branch.inputs, branch.outputs, over
        self.parameters, self.buffers, self.sizes, self.may_cut = joined(self.paths.items())

    @property
    def input_sizes(self):
        return self.paths["branch"].input_sizes

    @property
    def output_sizes(self):
        return self.paths["branch"].output_sizes

    def cost(self, length):
        return sum(path.cost(length) for path in self.paths.values())

    def forward(self, sh, p, x, ctx):
        saved, extras = {}, {}
        total: Any = None if "shortcut" in self.paths else x
        for name, path in self.paths.items():
            y, saved[name], *extra = path.forward(sh, p[name], x, ctx)
            if extra:
                extras[name] = extra[0]
            total = y if total is None else plus(total, y)
        y, positive = relu(total, want_slope=ctx.training and ctx.saving)
        return y, (saved, positive), _joined_extra(extras)

    def backward_input(self, sh, p, saved, dy):
        saved, positive = saved
        dy, rests, gradients = kept_where(dy, positive), {}, []
        for name, path in self.paths.items():
            dx, rests[name] = path.backward_input(sh, p[name], saved[name], dy)
            gradients.append(dx)

        def reduced(dx):
            for gradient in gradients[1:]:
                dx = plus(dx, wait_for(gradient))
            return sh.start_all_reduce(dx, over=self.over)

        dx = then(gradients[0], reduced)
        if "shortcut" not in self.paths:
            dx = then(dx, lambda dx: plus(dx, dy))
        return dx, (rests, dx if isinstance(dx, Deferred) else None)

    def backward_weight(self, sh, rest, g):
        rests, under_way = rest
        for name, path in self.paths.items():
            path.backward_weight(sh, rests[name], g[name])
            if under_way is not None:
                under_way.finish()  # its reduction runs while the next path's weight gradients are computed


# --- Two dense layers with a skip connection, which makes a thousand layers trainable


class Skip(Chain):
    """y[b d] = x[b d] + down(up(x[b d])), with up: d -> f and down: f -> d in the layers' own letters

    Inputs and outputs have the same sharding, so their sum needs no communication. The names of parameters begin with
    ``up/`` and ``down/``. Raises UsageError if letters, sizes or options of the two layers do not fit. After He et al.,
    "Identity mappings in deep residual networks" (2016).
    """

    adds_input = True

    def __init__(self, up: Linear, down: Linear) -> None:
        for before, after in ((up, down), (down, up)):
            out, into = before.letters[1], after.letters[0]
            left = out, before.sizes[out], before.gather_output
            right = into, after.sizes[into], after.slice_input
            if left != right:
                raise UsageError(
                    f"Skip: output (letter, size, gathered) {left} does not fit input (letter, size, sliced) {right}"
                )
        self.up, self.down = up, down
        super().__init__(("up", up), ("down", down))
