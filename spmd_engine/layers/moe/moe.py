"""A mixture of experts: a router chooses a few perceptrons for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import Array, at_least_one, backend_of, number_of
from spmd_engine.arrays.elementwise import add_to, multiply_by
from spmd_engine.arrays.precision import accumulated_in, rounded, widened
from spmd_engine.arrays.random import key_of
from spmd_engine.comm.pending import then, wait_for
from spmd_engine.layers.declarations import Buffer, Parameter, SideOutput
from spmd_engine.layers.layer import Extra, ForwardContext, GradientSums, Layer
from spmd_engine.layers.mlp import ACTIVATIONS, GATES
from spmd_engine.layers.moe.dispatch import Dispatch, capacity_of, keep
from spmd_engine.layers.moe.routing import (
    Choices,
    RouterOptions,
    Tokens,
    choose,
    expert_counts,
    highest,
    weights_gradient,
)
from spmd_engine.sharding.shards import Shards

#: The parameters and the rows of each expert.
Experts = Sequence[tuple[Mapping[str, Array], slice]]


class Perceptron:
    """y[t d] = activation(x[t d] · w0[d f]) · w1[f d], for the rows t of each expert, without biases

    ``gated``: y[t d] = (silu(x[t d] · gate[d f]) · (x · up[d f])) · down[f d]. With f sharded, y and dx are unreduced
    over f, as are those of an MLP before its reduction. There is one product for each expert; elementwise steps are
    for the rows of all experts at once.
    """

    def __init__(self, activation: str = "gelu", *, gated: bool = False, std: float = 0.02, out_std: float = 0.02):
        self.activation = GATES["silu"] if gated else ACTIVATIONS[activation]
        self.first, self.last = (("gate", "up"), "down") if gated else (("w0",), "w1")
        self.parameters = {name: Parameter("d f", std=std) for name in self.first}
        self.parameters[self.last] = Parameter("f d", std=out_std)

    def forward(self, experts: Experts, x: Array, hidden: int, want_slopes: bool) -> tuple[Array, Any]:
        """y[t d] of x[t d], and what the backward needs; ``hidden`` is the size of f on this rank."""
        xp = backend_of(x).xp
        projections = [xp.empty((len(x), hidden), x.dtype) for _ in self.first]
        y = xp.empty_like(x)
        for p, rows in experts:
            for name, z in zip(self.first, projections, strict=True):
                einsum("td,df->tf", x[rows], p[name], out=z[rows])
        h, slopes = self.activation(*projections, want_slopes)
        for p, rows in experts:
            einsum("tf,fd->td", h[rows], p[self.last], out=y[rows])
        return y, (x, h, slopes)

    def backward_input(self, experts: Experts, saved: Any, dy: Array) -> tuple[Array, Any]:
        """dx[t d], and what ``backward_weight`` needs."""
        x, h, slopes = saved
        xp = backend_of(dy).xp
        dh, dx = xp.empty_like(h), xp.empty_like(x)
        for p, rows in experts:
            einsum("td,fd->tf", dy[rows], p[self.last], out=dh[rows])
        if isinstance(slopes, tuple):
            gradients = [dh * slope for slope in slopes]
        else:
            multiply_by(dh, slopes)
            gradients = [dh]
        for p, rows in experts:
            for name, dz in zip(self.first, gradients, strict=True):
                einsum("tf,df->td", dz[rows], p[name], out=dx[rows], accumulate=dz is not gradients[0])
        return dx, (x, h, gradients, dy)

    def backward_weight(self, rest: Any, gradient_sums: Sequence[tuple[GradientSums, slice]]) -> None:
        """Add the gradients of each expert's parameters, from its rows alone."""
        x, h, gradients, dy = rest
        for g, rows in gradient_sums:
            for name, dz in zip(self.first, gradients, strict=True):
                g.einsum(name, "td,tf->df", x[rows], dz[rows])
            g.einsum(self.last, "tf,td->fd", h[rows], dy[rows])


# --- Shared experts, which every token goes through


_GATE = "shared_gate"


class SharedExperts:
    """y[t d] = Σ_i shared_i(x[t d]), times sigmoid(x · shared_gate[d]) if ``weighted``, over ``count`` equal experts

    One expert of m times the hidden width is stored as m of them. With f sharded, y and dx are unreduced over f. The
    weight is replicated along f, but its gradient is linear in the unreduced y, and so stays unreduced: that of
    shared_gate is summed over f as well.
    """

    def __init__(self, perceptron: Perceptron, count: int, weighted: bool, std: float) -> None:
        self.perceptron, self.count, self.weighted = perceptron, count, weighted
        self.parameters: dict[str, Parameter] = {}
        for number in range(count):
            self.parameters |= {f"shared{number}/{key}": parameter for key, parameter in perceptron.parameters.items()}
        if weighted:
            self.parameters[_GATE] = Parameter("d", std=std, summed="bsf")

    def forward(self, p: Mapping[str, Any], x: Array, hidden: int, keep: bool) -> tuple[Array | None, Any]:
        """y of x, or None without experts, and what the backward needs; ``hidden`` is the size of f on this rank."""
        y, saved = None, []
        for number in range(self.count):
            y_i, expert_saved = self.perceptron.forward([(p[f"shared{number}"], slice(0, len(x)))], x, hidden, keep)
            if y is not None:
                y_i += y
            y = y_i
            saved.append(expert_saved)
        if not self.weighted:
            return y, (saved, None)
        assert y is not None, "a weight goes with a shared expert"
        logits = einsum("td,d->t", x, p[_GATE], dtype=accumulated_in(x.dtype))
        xp = backend_of(logits).xp
        small = xp.exp(-xp.abs(logits))
        weights = xp.where(logits < 0, small, 1.0) / (1.0 + small)  # the sigmoid, without overflow
        return rounded(y * weights[:, None], y.dtype), (saved, (x, y, weights))

    def backward_input(self, p: Mapping[str, Any], saved: Any, dy: Array) -> tuple[Array | None, Any]:
        """dx, and what ``backward_weight`` needs."""
        saved, gate_saved = saved
        dx, gate_rest = None, None
        if gate_saved is not None:
            x, y, weights = gate_saved
            dlogits = (widened(dy) * widened(y)).sum(axis=1) * (weights * (1.0 - weights))
            dx, gate_rest = rounded(dlogits[:, None] * p[_GATE], dy.dtype), (x, dlogits)
            dy = rounded(dy * weights[:, None], dy.dtype)
        rests = []
        for number, expert_saved in enumerate(saved):
            dx_i, rest = self.perceptron.backward_input([(p[f"shared{number}"], slice(0, len(dy)))], expert_saved, dy)
            if dx is not None:
                dx_i += dx
            dx = dx_i
            rests.append(rest)
        return dx, (rests, gate_rest, slice(0, len(dy)))

    def backward_weight(self, rest: Any, g: GradientSums) -> None:
        """Add the gradients of all experts and of the gate."""
        rests, gate_rest, rows = rest
        for number, expert_rest in enumerate(rests):
            self.perceptron.backward_weight(expert_rest, [(g[f"shared{number}"], rows)])
        if gate_rest is not None:
            x, dlogits = gate_rest
            g.einsum(_GATE, "td,t->d", x, dlogits)


# --- The router: sums of its choices over ranks, and losses. ``routing`` has the choice itself
#
# Capacity and balance are defined over the global micro-batch: its number of tokens, and how many of them chose each
# expert, are one small all_reduce over the axes that shard tokens, under way while these are sent.


@dataclass
class Routed:
    """The choices of one micro-batch, and their sums over ranks, which may be under way."""

    logits: Array  #: [t E]
    choices: Choices
    kept: Array  #: bool[t k]: the pairs (token, choice) that are sent; others are unused or dropped
    own_counts: Array  #: int64[1 E]: pairs of this rank by expert
    _sums: Any  #: [1 + E], or under way: the micro-batch's tokens, then its pairs by expert; None: not needed
    sequence_counts: Array | None  #: int64[b E], if there is a loss for each sequence
    _tokens: Any = None

    @property
    def sums(self) -> Array:
        """[1 + E]: the number of tokens of the micro-batch, and of the pairs that chose each expert."""
        self._sums = wait_for(self._sums)
        return self._sums

    @property
    def tokens(self) -> Any:
        """Number of tokens of the global micro-batch; on a device if it is summed there."""
        if self._tokens is None:  # a cached_property would lock it for all virtual ranks
            self._tokens = self.sums[0] if backend_of(self.sums).on_device else int(self.sums[0])
        return self._tokens

    @property
    def experts(self) -> Array:
        """int64[t k]: the expert of each pair; -1 if it is not sent."""
        return backend_of(self.kept).xp.where(self.kept, self.choices.experts, -1)

    @property
    def decided(self) -> tuple:
        """Choices that a recomputation uses again."""
        return self.choices.decided, self.kept, self.own_counts, self.sums, self.sequence_counts, self._tokens


class Router:
    """logits[t E] = x[t d] · router[d E], the choices of each token, their losses and the bias.

    Losses and counts are side outputs: ``balance``, ``sequence_balance`` and ``z`` if ``options`` have them; ``load``,
    pairs (token, choice) by expert, before any is dropped; the number of pairs ``dropped`` for lack of capacity; and
    the mean ``entropy`` of a token's scores, in nats. Outside of training nothing is random: a second choice is always
    used. With a KV cache, a few tokens at a time, capacity is unlimited, and routing is learned.
    """

    def __init__(self, width: int, experts: int, options: RouterOptions, std: float) -> None:
        options.check(experts)
        self.experts, self.options = experts, options
        self.parameters = {"router": Parameter("d E", std=std, summed="bsf")}
        self.buffers = {}
        if options.bias_rate:
            fold = partial(bias_fold, rate=options.bias_rate)
            self.buffers = {"bias": Buffer("E", fold, per_step=True, summed="bs")}
        coefficients = {
            "balance": options.balance_loss,
            "sequence_balance": options.sequence_balance_loss,
            "z": options.z_loss,
        }
        self.losses = {name: coefficient for name, coefficient in coefficients.items() if coefficient}
        self.side_outputs = {name: SideOutput(loss=True, summed="bs") for name in self.losses}
        self.side_outputs |= {
            "load": SideOutput("E", summed="bs"),
            "dropped": SideOutput(summed="bs"),
            "entropy": SideOutput(summed="bs"),
        }

    def forward(self, sh: Shards, p: Any, x: Array, samples: int, ctx: ForwardContext) -> Routed:
        """The choices of the tokens x[t d] of a number of ``samples``. Collective over the axes that shard b and s."""
        xp = backend_of(x).xp
        logits = einsum("td,dE->tE", x, p["router"], dtype=accumulated_in(x.dtype))
        options = self._options(ctx)
        if ctx.decided is not None:
            chosen, *rest = ctx.decided
            return Routed(logits, choose(logits, None, options, decided=chosen), *rest)
        tokens = self._tokens(sh, samples, ctx)
        key = key_of(ctx.seed, "routing", ctx.step, sh.label)
        choices = choose(logits, p.get("bias"), options, tokens=tokens, key=key)
        counts = expert_counts(choices)
        sums = sequence_counts = None
        count = None if sh.axes("bs") else len(x)
        if ctx.training or options.capacity_factor is not None:
            sums = xp.concatenate((xp.full(1, len(x)), counts[0]))
            sums = sh.start_all_reduce(sums, over="bs")
        if ctx.training and "sequence_balance" in self.losses:
            sequence_counts = sh.all_reduce(expert_counts(choices, samples), over="s")
        routed = Routed(logits, choices, choices.used, counts, sums, sequence_counts, count)
        if options.capacity_factor is not None:
            per_rank = options.scope == "shard"
            capacity = capacity_of(options, len(x) if per_rank else int(routed.tokens), self.experts)
            gather = (lambda rows: [rows]) if per_rank else (lambda rows: [sh.gather_rows(rows, over="bs")])
            routed.kept = keep(choices, capacity, tokens, gather)
        return routed

    def extra(self, routed: Routed, ctx: ForwardContext) -> Extra:
        """Losses, counts and the update of the bias, for a forward in training."""
        outputs = {name: self._loss(routed, name, coefficient) for name, coefficient in self.losses.items()}
        outputs["load"] = routed.own_counts[0]
        outputs["dropped"] = number_of((routed.choices.used & ~routed.kept).sum())
        outputs["entropy"] = ctx.share * entropy(routed.choices, routed.tokens)
        updates = {"bias": routed.own_counts[0]} if self.buffers else {}
        return Extra(updates, outputs, routed.decided)

    def backward(self, sh: Shards, routed: Routed, dweights: Array, side: Any) -> Array:
        """dlogits[t E] of dweights[t k], unreduced over f as these are, and of the losses, on the first rank of f."""
        dlogits = weights_gradient(routed.choices, dweights)
        if sh.part("f") == 0:
            for name, coefficient in self.losses.items():
                dlogits += self._loss_gradient(routed, name, coefficient * side[name])
        return dlogits

    def _loss(self, routed: Routed, name: str, coefficient: float) -> Any:
        if name == "z":
            return z_loss(routed.logits, routed.tokens, coefficient)
        return balance_loss(routed.choices, self._counts(routed, name), routed.tokens, coefficient)

    def _loss_gradient(self, routed: Routed, name: str, coefficient: float) -> Array:
        if name == "z":
            return z_gradient(routed.logits, routed.tokens, coefficient)
        return balance_gradient(routed.choices, self._counts(routed, name), routed.tokens, coefficient)

    def _counts(self, routed: Routed, name: str) -> Array:
        if name == "sequence_balance":
            return routed.sequence_counts
        return routed.own_counts if self.options.scope == "shard" else routed.sums[None, 1:]

    def _options(self, ctx: ForwardContext) -> RouterOptions:
        options = self.options
        if not ctx.training and options.second_choice == "random":
            options = replace(options, second_choice="always", second_probability=None)
        if ctx.cache is not None:
            options = replace(options, routing="learned", capacity_factor=None)
        return options

    def _tokens(self, sh: Shards, samples: int, ctx: ForwardContext) -> Any:
        """The numbers of these tokens, if the options need them."""
        options = self.options
        if (
            ctx.cache is not None
            or options.capacity_factor is None
            and options.routing == "learned"
            and (options.second_choice == "always" or not ctx.training)
        ):
            return None
        numbers = ctx.samples
        if numbers is None:  # they are numbered only in training
            xp = backend_of(ctx.positions).xp
            samples_by_rank = sh.gather_rows(xp.array([samples]), over="b")
            numbers = xp.arange(samples) + int(samples_by_rank[: sh.part("b")].sum())
        return Tokens(numbers, ctx.positions)


# --- Balance of experts: losses of the router with their gradients, and a bias that needs no loss
#
# Letters as in ``routing``: t tokens of this rank, E experts. T is the number of tokens of the *global* micro-batch.
# Each loss is this rank's share of a loss over the global micro-batch: shares are summed over the ranks that shard the
# tokens, gradients are those of the rank's own tokens, with no further factor.


def balance_loss(choices: Choices, counts: Array, tokens: Any, coefficient: float) -> float:
    """This rank's share of coefficient · E · Σ_i f_i P_i, the loss of Switch and GShard.

    f_i is the fraction of all pairs (token, choice) with expert i, from counts[1 E] (``expert_counts``, summed
    over the ranks that shard the tokens), so that f sums to 1 for any k. P_i is the mean over T ``tokens`` of expert
    i's share of a token's scores, over all experts. Perfect balance gives 1 (times the coefficient).

    With counts[b E] of b sequences (tokens in b equal runs; summed over the ranks that shard a sequence) it is the mean
    of this loss over sequences (DeepSeek-V3, eq. 17-20). With a rank's own counts (scope "shard") it is the mean of
    the ranks' own losses, weighted by their tokens.
    """
    if not choices.shares.size:
        return 0.0
    share_gradient = _share_gradient(choices, counts, tokens, coefficient)
    shares = choices.shares.reshape(len(share_gradient), -1, choices.shares.shape[1])
    return number_of((shares.sum(axis=1) * share_gradient).sum())


def balance_gradient(choices: Choices, counts: Array, tokens: Any, coefficient: float) -> Array:
    """dlogits[t E] of ``balance_loss``. Counts are constants: only the scores carry a gradient."""
    rows, width = choices.shares.shape
    share_gradient = _share_gradient(choices, counts, tokens, coefficient)
    share_gradient = share_gradient.repeat(rows // len(share_gradient) if len(share_gradient) else 0, axis=0)
    dlogits = share_gradient - (choices.shares * share_gradient).sum(axis=1, keepdims=True)
    dlogits *= choices.shares
    if choices.slope is not None:
        dlogits *= choices.slope
    return dlogits


def z_loss(logits: Array, tokens: Any, coefficient: float) -> float:
    """This rank's share of coefficient · mean over T ``tokens`` of logsumexp(logits[t E])^2 (ST-MoE, eq. 5)."""
    return number_of((_log_sum(logits)[0] ** 2).sum()) * coefficient / at_least_one(tokens)


def z_gradient(logits: Array, tokens: Any, coefficient: float) -> Array:
    """dlogits[t E] of ``z_loss``."""
    log_sum, softmax = _log_sum(logits)
    return softmax * (log_sum * _per_token(2 * coefficient, tokens, logits.dtype))[:, None]


def entropy(choices: Choices, tokens: Any) -> float:
    """This rank's share of the mean over T ``tokens`` of -Σ q log q, in nats, with q a token's shares of scores.

    log E if all scores are equal, 0 if one expert has all of the score.
    """
    xp = backend_of(choices.shares).xp
    logs = xp.log(xp.maximum(choices.shares, xp.finfo(choices.shares.dtype).tiny))
    return -number_of((choices.shares * logs).sum()) / at_least_one(tokens)


def bias_fold(bias: Array, counts: Array, rate: float) -> Array:
    """The next step's bias[E]: raised by ``rate`` for experts that got fewer pairs than the mean, lowered for others.

    ``counts[E]`` are those of an optimizer step, over all micro-batches and axes. After Wang et al.,
    "Auxiliary-Loss-Free Load Balancing" (2024); the mean of the change is subtracted, so that the bias has no common
    drift, which would change no choice.
    """
    xp = backend_of(bias).xp
    change = xp.sign(counts.sum() - counts * counts.size).astype(bias.dtype)  # exact: the mean is never rounded
    return bias + (change - change.mean()) * bias.dtype.type(rate)


def _share_gradient(choices: Choices, counts: Array, tokens: Any, coefficient: float) -> Array:
    """[n E]: the gradient of the loss by a token's share of each expert."""
    counts = counts.astype(choices.shares.dtype)
    f = counts / counts.sum(axis=1, keepdims=True).clip(1)
    return f * _per_token(coefficient * counts.shape[1], tokens, f.dtype)


def _per_token(factor: float, tokens: Any, dtype: Any) -> Any:
    """factor / T as a number of this dtype, or an array on the device."""
    share = factor / at_least_one(tokens)
    return share.astype(dtype) if hasattr(share, "astype") else dtype.type(share)


def _log_sum(logits: Array) -> tuple[Array, Array]:
    """logsumexp[t] and softmax[t E] of logits."""
    xp = backend_of(logits).xp
    top = highest(logits)
    softmax = xp.exp(logits - top[:, None])
    sums = softmax.sum(axis=1)
    softmax /= sums[:, None]
    return xp.log(sums) + top, softmax


# --- A mixture of experts: each token goes through a few of many perceptrons, which a router chooses


class MoE(Layer):
    """y[b s d] = Σ_j weight_j · expert_j(x[b s d]) over the k experts that a token chose + Σ_i shared_i(x)

    A rank has the experts of its shard of e, each with f sharded as in an MLP. An all_to_all along the axes of e sends
    tokens to their experts, and another one returns the results, so an expert sees the tokens of all ranks along these
    axes, and its gradient is summed over the other axes only. The results are unreduced over f; they are combined at
    the source and reduced together with those of the shared experts, which are computed meanwhile.

    In the backward the gradient of the combination's weights is unreduced over f. All later steps are linear in it, so
    it stays unreduced: one reduction of dx serves experts and router, and the router's gradient is summed over f as
    well. Auxiliary losses are replicated along f: only the first rank adds their gradients.

    ``activation`` and ``gated`` are those of each ``Perceptron``. With a ``shared_gate``, the result of the shared
    experts is weighted by a sigmoid: see ``SharedExperts``.
    """

    may_cut, across = "bsfe", "f"

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        router: RouterOptions | None = None,
        *,
        shared: int = 0,
        shared_gate: bool = False,
        activation: str = "gelu",
        gated: bool = False,
        std: float = 0.02,
        out_std: float = 0.02,
    ) -> None:
        self.router = Router(width, experts, router or RouterOptions(), std)
        self.sizes = {"d": width, "f": hidden, "e": experts, "E": experts}
        self.perceptron = Perceptron(activation, gated=gated, std=std, out_std=out_std)
        self.shared = SharedExperts(self.perceptron, shared, shared_gate, std)
        self.parameters = {**self.router.parameters, **self.shared.parameters}
        for number in range(experts):
            for name, parameter in self.perceptron.parameters.items():
                self.parameters[f"expert{number}/{name}"] = replace(parameter, element=("e", number))
        self.buffers, self.side_outputs = self.router.buffers, self.router.side_outputs

    def cost(self, length):
        active = (self.router.options.top_k + self.shared.count) * len(self.perceptron.parameters)
        return float(self.sizes["d"] * (active * self.sizes["f"] + self.sizes["E"]))

    def forward(self, sh, p, x, ctx):
        x = sh.all_gather(x, "b s d", "s", across="f")
        shape, x = x.shape, x.reshape(-1, x.shape[2])
        keep = ctx.training and ctx.saving
        routed = self.router.forward(sh, p, x, shape[0], ctx)
        dispatch = Dispatch(sh, routed.experts, self.sizes["e"])
        rows = dispatch.start(x[dispatch.tokens])
        y, shared_saved = self.shared.forward(p, x, self._hidden(sh), keep)  # while tokens are sent
        rows, experts_saved = self.perceptron.forward(
            [(p[f"expert{number}"], span) for number, span in zip(dispatch.here, dispatch.rows, strict=True)],
            wait_for(rows),
            self._hidden(sh),
            keep,
        )
        rows = wait_for(dispatch.start_back(rows))
        y = _sum(dispatch.gathered(rows, shape[2], routed.choices.weights), y)
        y = sh.reduce_scatter(y.reshape(shape), "b s d", over="f", onto="s")
        saved = shape, x, routed, dispatch, rows, shared_saved, experts_saved
        return y, saved, *([self.router.extra(routed, ctx)] if ctx.training and ctx.decided is None else [])

    def backward_input(self, sh, p, saved, dy, *side):
        shape, x, routed, dispatch, rows, shared_saved, experts_saved = saved
        dy = sh.all_gather(dy, "b s d", "s", across="f").reshape(-1, shape[2])
        drows, dweights = dispatch.gradients(dy, rows, routed.choices.weights)
        drows = dispatch.start(drows)
        dx, shared_rest = self.shared.backward_input(p, shared_saved, dy)  # while gradients are sent
        dlogits = self.router.backward(sh, routed, dweights, *side or [{}])
        dx = _sum(einsum("tE,dE->td", dlogits, p["router"], dtype=dy.dtype), dx)
        experts = [(p[f"expert{number}"], span) for number, span in zip(dispatch.here, dispatch.rows, strict=True)]
        drows, rest = self.perceptron.backward_input(experts, experts_saved, wait_for(drows))

        def combined(drows):
            total = _sum(dispatch.gathered(drows, shape[2]), dx)
            return sh.reduce_scatter(total.reshape(shape), "b s d", over="f", onto="s")

        # The rows' gradients are sent while those of the experts' weights are computed.
        return then(dispatch.start_back(drows), combined), (x, dlogits, dispatch, rest, shared_rest)

    def backward_weight(self, sh, rest, g):
        x, dlogits, dispatch, rest, shared_rest = rest
        g.einsum("router", "td,tE->dE", x, dlogits)
        experts = zip(dispatch.here, dispatch.rows, strict=True)
        self.perceptron.backward_weight(rest, [(g[f"expert{number}"], span) for number, span in experts])
        self.shared.backward_weight(shared_rest, g)

    def _hidden(self, sh):
        """The size of f on this rank."""
        span = sh.span("f", self.sizes["f"])
        return span.stop - span.start


def _sum(x: Array, other: Array | None) -> Array:
    """Add ``other``, if there is one, to ``x`` in place, and return ``x``."""
    if other is not None:
        add_to(x, other)
    return x
