"""Which pairs (token, choice) an expert of limited capacity takes, over all tokens of a micro-batch on any mesh.

Claims come in one global order: all first choices before any second one, then by token, (sample, position). An expert
of capacity C takes its first C claims, or, by probability, the C of the highest weight, ties in that same order. What
it does not take is dropped: the weights of the token's other experts stay as they are, not renormalised.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.scatter import count_each
from spmd_engine.layers.moe.router_options import RouterOptions
from spmd_engine.layers.moe.routing import Choices, Tokens

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

    ``gather`` returns the arrays of all ranks among which the tokens of the micro-batch are cut, in any order, this
    rank's own among them; ``lambda own: [own]`` on one device, and where capacity is a rank's own (scope "shard").
    """
    if capacity is None:
        return choices.used
    if choices.options.drop_by == "position":
        return choices.used & (_places(choices, tokens, gather) < capacity)
    return choices.used & _among_highest(choices, capacity, tokens, gather)


def _places(choices: Choices, tokens: Tokens, gather: Gather) -> Array:
    """int64[t k]: how many claims of the same expert come before each pair's; of unused pairs, anything.

    Between the tokens of a run there is no other rank's: so the counts of each run, choice and expert say all that
    others need to know.
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
    # The bits of numbers that are not negative are in the order of the numbers: so integers say all of a claim.
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
