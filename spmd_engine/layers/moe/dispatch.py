"""Which pairs (token, expert) an expert takes, and the way of tokens to their experts and back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import ceil
from typing import Any

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import CPU, Array, backend_of
from spmd_engine.arrays.fused import chunks
from spmd_engine.arrays.scatter import count_each
from spmd_engine.layers.deferred import Deferred, then
from spmd_engine.layers.moe.routing import Choices, RouterOptions, Tokens
from spmd_engine.sharding.shards import Shards

Gather = Callable[[Array], list[Array]]  # int64[n m] of each rank that cuts the tokens, n may differ


def capacity_of(options: RouterOptions, tokens: int, experts: int) -> int | None:
    """Tokens an expert takes of so many: max(minimum, ceil(factor · tokens · k / experts)); None: all that come."""
    if options.capacity_factor is None:
        return None
    # A decimal fraction as it was written: 1.1 x 100 / 10 is 11, and not, rounded in binary, a little more.
    from fractions import Fraction  # which few models need, and takes longer to load than most of this package

    share = Fraction(repr(options.capacity_factor)) * tokens * options.top_k / experts
    return max(options.minimum_capacity, ceil(share))


def keep(choices: Choices, capacity: int | None, tokens: Tokens, gather: Gather) -> Array:
    """bool[t k]: the used pairs that their expert takes. Collective by one ``gather`` if there is a capacity.

    ``gather`` returns the arrays of all ranks among which the tokens of the micro-batch are sharded, in any order, this
    rank's own among them; ``lambda own: [own]`` on one device, and where capacity is a rank's own (scope "shard").
    """
    if capacity is None:
        return choices.used
    if choices.options.drop_by == "position":
        return choices.used & (_places(choices, tokens, gather) < capacity)
    return choices.used & _among_highest(choices, capacity, tokens, gather)


def _places(choices: Choices, tokens: Tokens, gather: Gather) -> Array:
    """int64[t k]: how many claims of the same expert come before each pair's; of unused pairs, anything.

    Between the tokens of a run there is no other rank's: so other ranks need no more than the counts of each run,
    choice and expert.
    """
    xp = backend_of(choices.experts).xp
    k, width = choices.options.top_k, choices.shares.shape[1]
    first, run = tokens.runs()
    cells = first.size * k * width
    cell = (run.reshape(-1, 1) * k + xp.arange(k)) * width + choices.experts  # (run, choice, expert) of each pair
    cell = xp.where(choices.used, cell, cells).reshape(-1)  # unused pairs in one of their own, after the others
    counts = count_each(cell, cells + 1)
    order = xp.argsort(cell, kind="stable")
    place = xp.empty_like(order)
    place[order] = xp.arange(cell.size) - (counts.cumsum() - counts)[cell[order]]  # among those of the cell

    counts = counts[:-1].reshape(first.size, k * width)
    table = xp.concatenate(gather(xp.concatenate([first[:, None], counts], axis=1)))
    table = table[xp.argsort(table[:, 0])]
    of_runs = table[:, 1:].reshape(-1, k, width)
    of_choices = of_runs.sum(axis=0)
    before = of_runs.cumsum(axis=0) - of_runs + of_choices.cumsum(axis=0) - of_choices  # earlier runs and choices
    ours = before[xp.searchsorted(table[:, 0], first)].reshape(-1)
    return (place + xp.concatenate([ours, xp.zeros(1, ours.dtype)])[cell]).reshape(choices.experts.shape)


def _among_highest(choices: Choices, capacity: int, tokens: Tokens, gather: Gather) -> Array:
    """bool[t k]: whether a pair is among the ``capacity`` first claims of its expert, highest weight first."""
    xp = backend_of(choices.experts).xp
    rows, k = choices.experts.shape
    width = choices.shares.shape[1]
    number = tokens.numbers().reshape(-1, 1)
    # The bits of numbers that are not negative are in the order of the numbers: a claim is four integers.
    weight = choices.weights.astype(xp.float64).view(xp.int64)
    columns = choices.experts, -weight, xp.broadcast_to(xp.arange(k), (rows, k)), xp.broadcast_to(number, (rows, k))
    claims = xp.stack([column.reshape(-1) for column in columns], axis=1)
    own = _first(claims[choices.used.reshape(-1)], capacity, width)[0]  # what is not among a rank's own first is out
    last = _first(xp.concatenate(gather(own)), capacity, width)[1]  # of each expert, the last claim that it takes
    limit = last[choices.experts.reshape(-1)]
    kept = claims[:, 3] <= limit[:, 3]
    for column in (2, 1):
        kept = (claims[:, column] < limit[:, column]) | ((claims[:, column] == limit[:, column]) & kept)
    return kept.reshape(rows, k)


def _first(claims: Array, capacity: int, width: int) -> tuple[Array, Array]:
    """The first claims[n 4] of each expert, at most ``capacity``, in order; and the last one of those, [E 4].

    Where an expert has fewer, that last one is after any claim; where the capacity is 0, before any.
    """
    xp = backend_of(claims).xp
    claims = claims[xp.lexsort(claims.T[::-1])]
    counts = count_each(claims[:, 0], width)
    starts = counts.cumsum() - counts
    taken = claims[xp.arange(len(claims)) - starts[claims[:, 0]] < capacity]
    bounds = xp.iinfo(xp.int64)
    last = xp.full((width, 4), bounds.max if capacity else bounds.min, xp.int64)
    full = xp.flatnonzero(counts >= capacity)
    if capacity:
        last[full] = claims[starts[full] + capacity - 1]
    return taken, last


# --- Tokens travel to the experts they chose, on any rank, and back


class Dispatch:
    """Where the rows of one micro-batch go: a row is a token on its way to one of the experts it chose.

    Made of ``experts``[t k], the choices of this rank's tokens, of which negative ones are dropped. Rows lie in the
    order of their experts, those of one expert in the order of tokens, and experts in the order of the parts they are
    in: so what goes to one rank lies together. At its experts what comes is put in their order: ``rows`` says which are
    each one's. Its making is collective along the axes of e: each rank sends E numbers, of the rows to come.
    """

    def __init__(self, sh: Shards, experts: Array, count: int) -> None:
        xp, host = backend_of(experts).xp, CPU.xp
        self._sh, self._shape = sh, experts.shape
        parts = host.array(sh.parts("e", count), host.int64)
        by_part = host.argsort(parts, kind="stable")  # experts, in the order of the parts they are in
        slots = host.empty(count + 1, host.int64)
        slots[by_part], slots[-1] = host.arange(count), count  # the last: of what is dropped
        slot = xp.asarray(slots)[experts.reshape(-1)]
        order = xp.argsort(slot, kind="stable")
        counts = backend_of(experts).to_host(count_each(slot, count + 1))[:count]
        order = order[: int(counts.sum())]
        self.choices = order  #: rows: the number of each one's choice, t k in all
        self.tokens = order // max(1, experts.shape[1])  #: rows: the token of each
        group = sh.group_of("e")
        there = host.bincount(parts, minlength=group.size if group else 1)
        self.here: list[int] = host.flatnonzero(parts == sh.part("e")).tolist()  #: experts on this rank
        ends = host.concatenate(([0], host.cumsum(there)))
        self._sent = [int(counts[a:b].sum()) for a, b in pairwise(ends)]
        came, _ = sh.all_to_all(counts, there.tolist(), over="e", received=[len(self.here)] * len(there))
        came = came.reshape(len(there), len(self.here))  # [ranks, experts here]
        self._came = came.sum(axis=1).tolist()
        self._arrange(came, xp)

    def _arrange(self, came: Array, xp: Any) -> None:
        """Rows come rank by rank; they are wanted expert by expert."""
        host = CPU.xp
        ends = host.concatenate(([0], host.cumsum(came.sum(axis=0)))).tolist()
        #: of each expert here, the rows that are its own
        self.rows = [slice(*pair) for pair in pairwise(ends)]
        self._by_expert = None
        if len(came) > 1 and len(self.here) > 1:
            starts = (host.cumsum(came) - came.reshape(-1)).reshape(came.shape)
            lengths, starts = came.T.reshape(-1), starts.T.reshape(-1)
            before = host.cumsum(lengths) - lengths
            self._by_expert = xp.asarray(host.arange(ends[-1]) + host.repeat(starts - before, lengths))
            self._by_rank = xp.empty_like(self._by_expert)
            self._by_rank[self._by_expert] = xp.arange(ends[-1])

    def start(self, rows: Array) -> Array | Deferred:
        """Rows, in the order of ``tokens``, on their way to their experts: there in the order of ``rows``."""
        return then(self._sh.start_all_to_all(rows, self._sent, over="e", received=self._came), self._sorted)

    def _sorted(self, rows: Array) -> Array:
        return rows if self._by_expert is None else rows[self._by_expert]

    def start_back(self, rows: Array) -> Array | Deferred:
        """What experts here made of their rows, on its way back, in the order of ``tokens`` there."""
        if self._by_expert is not None:
            rows = rows[self._by_rank]
        return self._sh.start_all_to_all(rows, self._came, over="e", received=self._sent)

    def _spread(self, values: Array) -> Array:
        """A number a row as a number a choice[t k], 0 where it was dropped."""
        xp = backend_of(values).xp
        whole = xp.zeros(self._shape[0] * self._shape[1], values.dtype)
        whole[self.choices] = values
        return whole.reshape(self._shape)

    def gathered(self, rows: Array, width: int, weights: Array | None = None) -> Array:
        """y[t d]: of each token the sum of its rows[. d], each times its weight[t k] if there are any."""
        xp = backend_of(rows).xp
        tokens, k = self._shape
        if not len(rows):
            return xp.zeros((tokens, width), rows.dtype)
        y, place = xp.empty((tokens, width), rows.dtype), xp.full(tokens * k, -1)
        place[self.choices] = xp.arange(len(rows))
        place, scale = place.reshape(tokens, k), weights
        if len(rows) < tokens * k:  # some were dropped
            scale = place >= 0 if weights is None else xp.where(place >= 0, weights, 0)
        for part in chunks(y):
            for choice in range(k):
                of_choice = rows[place[part, choice]]
                if scale is not None:
                    of_choice *= scale[part, choice, None]
                if choice:
                    y[part] += of_choice
                else:
                    y[part] = of_choice
        return y

    def gradients(self, dy: Array, rows: Array, weights: Array) -> tuple[Array, Array]:
        """Of y = ``gathered(rows, width, weights)``: drows[. d], in the order of ``tokens``, and dweights[t k]."""
        xp = backend_of(dy).xp
        drows, along = xp.empty_like(rows), xp.empty(len(rows), dy.dtype)
        weights = weights.reshape(-1)[self.choices]
        for part in chunks(drows):
            of_tokens = dy[self.tokens[part]]
            along[part] = einsum("td,td->t", of_tokens, rows[part])
            xp.multiply(of_tokens, weights[part, None], out=drows[part])
        return drows, self._spread(along)
