"""The router of a mixture of experts in a layer: what is global of its choices is summed here, the rest is ``routing``.

Capacity and balance are defined over the whole micro-batch: how many tokens it has, and how many of them chose each
expert, is one small all_reduce over the axes that cut tokens, under way while these travel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import key_of
from spmd_engine.layers import balance
from spmd_engine.layers.capacity import capacity_of, keep
from spmd_engine.layers.declarations import Buffer, Parameter, SideOutput
from spmd_engine.layers.later import wait_for
from spmd_engine.layers.layer import Extra, ForwardContext
from spmd_engine.layers.router_options import RouterOptions
from spmd_engine.layers.routing import Choices, Tokens, choose, expert_counts, weights_gradient
from spmd_engine.sharding.shards import Shards


@dataclass
class Routed:
    """What was chosen in one micro-batch, and its sums over ranks as soon as they are there."""

    logits: Array  #: [t E]
    choices: Choices
    kept: Array  #: bool[t k]: the pairs (token, choice) that travel; others are left out or dropped
    own_counts: Array  #: int64[1 E]: of this rank's pairs
    _sums: Any  #: 1 + E, or on its way: all tokens of the micro-batch, then its pairs by expert; None: nobody asks
    sequence_counts: Array | None  #: int64[b E], if there is a loss for each sequence

    @property
    def sums(self) -> Array:
        """1 + E: the number of tokens of the micro-batch, and of the pairs that chose each expert."""
        self._sums = wait_for(self._sums)
        return self._sums

    @property
    def tokens(self) -> int:
        """Of the whole micro-batch."""
        return int(self.sums[0])

    @property
    def experts(self) -> Array:
        """int64[t k]: where each pair goes; -1 where it does not travel."""
        return backend_of(self.kept).xp.where(self.kept, self.choices.experts, -1)

    @property
    def decided(self) -> tuple:
        """What a recomputation takes over."""
        return self.choices.decided, self.kept, self.own_counts, self.sums, self.sequence_counts


class Router:
    """logits[t E] = x[t d] · router[d E], what each token chooses by them, the losses of these choices and the bias.

    Its losses and counts are side outputs: ``balance``, ``sequence_balance`` and ``z`` as far as ``options`` have
    them; ``load``, pairs (token, choice) by expert, before any is dropped; how many were ``dropped`` for want of
    capacity; and the mean ``entropy`` of a token's scores, in nats. Outside of training nothing is left to chance: a
    second choice is always used. Who answers with a cache, a few tokens at a time, has no capacity, and routes as it
    has learned.
    """

    def __init__(self, width: int, experts: int, options: RouterOptions, std: float) -> None:
        options.check(experts)
        self.experts, self.options = experts, options
        self.parameters = {"router": Parameter("d E", std=std, summed="bsf")}
        self.buffers = {}
        if options.bias_rate:
            fold = partial(balance.bias_fold, rate=options.bias_rate)
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
        """What the tokens x[t d], of so many samples, choose. Collective over the axes that cut b and s."""
        xp = backend_of(x).xp
        logits = einsum("td,dE->tE", x, p["router"])
        options = self._options(ctx)
        if ctx.decided is not None:
            chosen, *rest = ctx.decided
            return Routed(logits, choose(logits, None, options, decided=chosen), *rest)
        tokens = self._tokens(sh, samples, ctx)
        key = key_of(ctx.seed, "routing", ctx.step, sh.label)
        choices = choose(logits, p.get("bias"), options, tokens=tokens, key=key)
        own = expert_counts(choices)
        sums = by_sequence = None
        if ctx.training or options.capacity_factor is not None:
            sums = xp.concatenate((xp.array([len(x)]), own[0]))
            sums = sh.start_all_reduce(sums, over="bs")
        if ctx.training and "sequence_balance" in self.losses:
            by_sequence = sh.all_reduce(expert_counts(choices, samples), over="s")
        routed = Routed(logits, choices, choices.used, own, sums, by_sequence)
        if options.capacity_factor is not None:
            alone = options.scope == "shard"
            capacity = capacity_of(options, len(x) if alone else routed.tokens, self.experts)
            gather = (lambda own: [own]) if alone else (lambda own: [sh.gather_rows(own, over="bs")])
            routed.kept = keep(choices, capacity, tokens, gather)
        return routed

    def told(self, routed: Routed, ctx: ForwardContext) -> Extra:
        """Losses, counts and the bias' update, of a forward in training."""
        values = {
            "balance": balance.balance_loss,
            "sequence_balance": balance.balance_loss,
        }
        outputs = {
            name: values[name](routed.choices, self._counts(routed, name), routed.tokens, coefficient)
            if name in values
            else balance.z_loss(routed.logits, routed.tokens, coefficient)
            for name, coefficient in self.losses.items()
        }
        outputs["load"] = routed.own_counts[0]
        outputs["dropped"] = float((routed.choices.used & ~routed.kept).sum())
        outputs["entropy"] = ctx.share * balance.entropy(routed.choices, routed.tokens)
        updates = {"bias": routed.own_counts[0]} if self.buffers else {}
        return Extra(updates, outputs, routed.decided)

    def backward(self, sh: Shards, routed: Routed, dweights: Array, side: Any) -> Array:
        """dlogits[t E] of dweights[t k], unreduced over f as these are, and of the losses, on the first along f."""
        dlogits = weights_gradient(routed.choices, dweights)
        if sh.part("f") == 0:
            for name, coefficient in self.losses.items():
                dlogits += self._loss_gradient(routed, name, coefficient * side[name])
        return dlogits

    def _loss_gradient(self, routed: Routed, name: str, coefficient: float) -> Array:
        if name == "z":
            return balance.z_gradient(routed.logits, routed.tokens, coefficient)
        return balance.balance_gradient(routed.choices, self._counts(routed, name), routed.tokens, coefficient)

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

    def _tokens(self, sh: Shards, samples: int, ctx: ForwardContext) -> Tokens | None:
        """Which tokens these are, for whom it matters."""
        options = self.options
        if ctx.cache is not None or options.capacity_factor is None and options.routing == "learned" and (
            options.second_choice == "always" or not ctx.training
        ):
            return None
        numbers = ctx.samples
        if numbers is None:  # outside of training nobody has counted them
            xp = backend_of(ctx.positions).xp
            there = sh.gather_rows(xp.array([samples]), over="b")
            numbers = xp.arange(samples) + int(there[: sh.part("b")].sum())
        return Tokens(numbers, ctx.positions)
