"""Capacity: which pairs (token, expert) an expert takes; and the dispatch of tokens to their experts and back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import ceil

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import CPU, Array, backend_of
from spmd_engine.arrays.fused import chunks
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.arrays.scatter import count_each
from spmd_engine.comm.pending import Deferred, then
from spmd_engine.layers.moe.routing import Choices, RouterOptions, Tokens
from spmd_engine.sharding.shards import Shards

Gather = Callable[[Array], list[Array]]  # int64[n m] of each rank that shards the tokens; n may differ


def capacity_of(options: RouterOptions, tokens: int, experts: int) -> int | None:
    """Tokens that an expert takes: max(minimum, ceil(factor · tokens · k / experts)); None: no limit."""
    if options.capacity_factor is None:
        return None
    # The exact decimal fraction: 1.1 x 100 / 10 is 11; rounded in binary, it is a little more.
    from fractions import Fraction  # few models need it, and its import is slow

    share = Fraction(repr(options.capacity_factor)) * tokens * options.top_k / experts
    return max(options.minimum_capacity, ceil(share))


def keep(choices: Choices, capacity: int | None, tokens: Tokens, gather: Gather) -> Array:
    """bool[t k]: the used pairs that their expert takes. Collective by one ``gather`` if there is a capacity.

    ``gather`` returns the arrays of all ranks that shard the tokens of the micro-batch, in any order, including this
    rank's own; ``lambda own: [own]`` on one device, and if each rank has its own capacity (scope "shard").
    """
    if capacity is None:
        return choices.used
    if choices.options.drop_by == "position":
        return choices.used & (_places(choices, tokens, gather) < capacity)
    return choices.used & _among_highest(choices, capacity, tokens, gather)


def _places(choices: Choices, tokens: Tokens, gather: Gather) -> Array:
    """int64[t k]: how many claims of the same expert come before that of each pair; undefined for unused pairs.

    The tokens of a run are consecutive, so other ranks only need the counts of each run, choice and expert.
    """
    xp = backend_of(choices.experts).xp
    k, width = choices.options.top_k, choices.shares.shape[1]
    first, run = tokens.runs()
    cells = first.size * k * width
    cell = (run.reshape(-1, 1) * k + xp.arange(k)) * width + choices.experts  # (run, choice, expert) of each pair
    cell = xp.where(choices.used, cell, cells).reshape(-1)  # the last cell is for unused pairs
    counts = count_each(cell, cells + 1)
    order = xp.argsort(cell, kind="stable")
    place = xp.empty_like(order)
    place[order] = xp.arange(cell.size) - (counts.cumsum() - counts)[cell[order]]  # within the cell

    counts = counts[:-1].reshape(first.size, k * width)
    table = xp.concatenate(gather(xp.concatenate([first[:, None], counts], axis=1)))
    table = table[xp.argsort(table[:, 0])]
    run_counts = table[:, 1:].reshape(-1, k, width)
    choice_counts = run_counts.sum(axis=0)
    before = run_counts.cumsum(axis=0) - run_counts + choice_counts.cumsum(axis=0) - choice_counts  # earlier ones
    rank_before = before[xp.searchsorted(table[:, 0], first)].reshape(-1)
    return (place + xp.concatenate([rank_before, xp.zeros(1, rank_before.dtype)])[cell]).reshape(choices.experts.shape)


def _among_highest(choices: Choices, capacity: int, tokens: Tokens, gather: Gather) -> Array:
    """bool[t k]: whether a pair is among the ``capacity`` first claims of its expert, highest weight first.

    Weights in one quantum are equal: see ``in_quanta``.
    """
    xp = backend_of(choices.experts).xp
    rows, k = choices.experts.shape
    width = choices.shares.shape[1]
    number = tokens.numbers().reshape(-1, 1)
    columns = (
        choices.experts,
        -in_quanta(choices.weights),
        xp.broadcast_to(xp.arange(k), (rows, k)),
        xp.broadcast_to(number, (rows, k)),
    )
    claims = xp.stack([column.reshape(-1) for column in columns], axis=1)
    candidates = _select_first(claims[choices.used.reshape(-1)], capacity, width)[0]  # others are dropped anyway
    last = _select_first(xp.concatenate(gather(candidates)), capacity, width)[1]  # the last that each expert takes
    limit = last[choices.experts.reshape(-1)]
    accepted = claims[:, 3] <= limit[:, 3]
    for column in (2, 1):
        accepted = (claims[:, column] < limit[:, column]) | ((claims[:, column] == limit[:, column]) & accepted)
    return accepted.reshape(rows, k)


QUANTUM_BITS = 8  #: after the first bit of a weight: those that count when weights are compared


def in_quanta(weights: Array) -> Array:
    """Nonnegative weights as integers, int64, that have their order; weights within a quantum have the same.

    Equal tokens have equal weights but for rounding errors, which differ between meshes. So weights are rounded, to
    the nearest number of 1 + ``QUANTUM_BITS`` bits: a quantum is 2^-9 to 2^-8 of the weight, at least 2^12 times an
    error of 2^-21, or 4 units of float32. The weights of equal scores, such as 1/2 and 1/3, are not at its borders.
    """
    xp = backend_of(weights).xp
    dropped = xp.finfo(xp.float64).nmant - QUANTUM_BITS
    # The bits of nonnegative floats have the order of the floats.
    return (weights.astype(xp.float64).view(xp.int64) + (1 << (dropped - 1))) >> dropped


def _select_first(claims: Array, capacity: int, width: int) -> tuple[Array, Array]:
    """The first claims[n 4] of each expert, at most ``capacity``, in order; and the last one of those, [E 4].

    If an expert has fewer claims, that last one is after any claim; if the capacity is 0, before any.
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


# --- Dispatch of tokens to their experts, on any rank, and back


class Dispatch:
    """The dispatch of one micro-batch: a row is a token that is sent to one of its experts.

    ``experts``[t k] are the choices of this rank's tokens; negative ones are dropped. Rows are in the order of their
    experts' shards, then of experts, then of tokens: so the rows for one rank are contiguous. Received rows are sorted
    by expert: ``rows`` has the slice of each. The constructor is collective along the axes of e: each rank sends E
    numbers of rows.
    """

    def __init__(self, sh: Shards, experts: Array, count: int) -> None:
        xp, host = backend_of(experts).xp, CPU.xp
        self._sh, self._shape = sh, experts.shape
        parts = host.array(sh.parts("e", count), host.int64)
        by_part = host.argsort(parts, kind="stable")  # experts, in the order of their shards
        slots = host.empty(count + 1, host.int64)
        slots[by_part], slots[-1] = host.arange(count), count  # the last slot is for dropped choices
        slot = backend_of(experts).constant(slots)[experts.reshape(-1)]
        order = xp.argsort(slot, kind="stable")
        counts = backend_of(experts).to_host(count_each(slot, count + 1))[:count]
        order = order[: int(counts.sum())]
        self.choices = order  #: by row: its choice, a number below t k
        self.tokens = order // max(1, experts.shape[1])  #: by row: its token
        group = sh.group_of("e")
        sizes = host.bincount(parts, minlength=group.size if group else 1)
        self.here: list[int] = host.flatnonzero(parts == sh.part("e")).tolist()  #: experts on this rank
        ends = host.concatenate(([0], host.cumsum(sizes)))
        self._sent = [int(counts[a:b].sum()) for a, b in pairwise(ends)]
        received, _ = sh.all_to_all(counts, sizes.tolist(), over="e", received=[len(self.here)] * len(sizes))
        received = received.reshape(len(sizes), len(self.here))  # [ranks, experts of this rank]
        self._came = received.sum(axis=1).tolist()
        # The order of received rows by expert; they arrive rank by rank.
        ends = host.concatenate(([0], host.cumsum(received.sum(axis=0)))).tolist()
        #: by expert of this rank: its rows
        self.rows = [slice(*pair) for pair in pairwise(ends)]
        self._by_expert = None
        if len(received) > 1 and len(self.here) > 1:
            starts = (host.cumsum(received) - received.reshape(-1)).reshape(received.shape)
            lengths, starts = received.T.reshape(-1), starts.T.reshape(-1)
            before = host.cumsum(lengths) - lengths
            self._by_expert = xp.asarray(host.arange(ends[-1]) + host.repeat(starts - before, lengths))
            self._by_rank = xp.empty_like(self._by_expert)
            self._by_rank[self._by_expert] = xp.arange(ends[-1])

    def start(self, rows: Array) -> Array | Deferred:
        """Start to send rows, in the order of ``tokens``, to their experts, where they have the order of ``rows``."""
        came, by_expert = self._sh.start_all_to_all(rows, self._sent, over="e", received=self._came), self._by_expert
        return came if by_expert is None else then(came, lambda rows: rows[by_expert])

    def start_back(self, rows: Array) -> Array | Deferred:
        """Start to send the results of this rank's experts back, where they have the order of ``tokens``."""
        if self._by_expert is not None:
            rows = rows[self._by_rank]
        return self._sh.start_all_to_all(rows, self._came, over="e", received=self._sent)

    def _spread(self, values: Array) -> Array:
        """Numbers by row as numbers by choice[t k], 0 for dropped choices."""
        xp = backend_of(values).xp
        by_choice = xp.zeros(self._shape[0] * self._shape[1], values.dtype)
        by_choice[self.choices] = values
        return by_choice.reshape(self._shape)

    def gathered(self, rows: Array, width: int, weights: Array | None = None) -> Array:
        """y[t d]: the sum of each token's rows[. d], multiplied by weights[t k] if given."""
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
                choice_rows = rows[place[part, choice]]
                if scale is not None:
                    choice_rows *= scale[part, choice, None]
                if choice:
                    y[part] += choice_rows
                else:
                    y[part] = choice_rows
        return y

    def gradients(self, dy: Array, rows: Array, weights: Array) -> tuple[Array, Array]:
        """drows[. d], in the order of ``tokens``, and dweights[t k] of y = ``gathered(rows, width, weights)``."""
        xp = backend_of(dy).xp
        drows, along = xp.empty_like(rows), xp.empty(len(rows), accumulated_in(dy.dtype))
        weights = weights.reshape(-1)[self.choices]
        for part in chunks(drows):
            token_gradients = dy[self.tokens[part]]
            along[part] = einsum("td,td->t", token_gradients, rows[part], dtype=along.dtype)
            drows[part] = token_gradients * weights[part, None]
        return drows, self._spread(along)
