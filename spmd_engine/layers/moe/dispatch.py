"""The way of tokens to the experts they chose, wherever these are, and back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import CPU, Array, backend_of
from spmd_engine.arrays.fused import chunks
from spmd_engine.arrays.scatter import count_each
from spmd_engine.layers.deferred import Deferred, then
from spmd_engine.sharding.shards import Shards


class Dispatch:
    """Where the rows of one micro-batch go: a row is a token on its way to one of the experts it chose.

    Made of ``experts``[t k], the choices of this rank's tokens, of which those that are negative are dropped: nobody
    goes there. Rows lie in the order of their experts, those of one expert in the order of tokens, and experts in the
    order of the parts they are in: so what goes to one rank lies together. At its experts what comes is put in their
    order: ``rows`` says which are each one's.
    Its making is collective along the axes of e: ranks tell each other how many rows come, E numbers each.
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
