"""Transport by messages in log2(n) rounds: between nodes, for arrays in host memory of small and medium size."""

from __future__ import annotations

import numpy as np

from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.blocks import reducer
from spmd_engine.comm.exchange import DATA, tag
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.rounds import Payload, broadcast_rounds, carry, gather_rounds, reduce_rounds
from spmd_engine.comm.transports.transport import REDUCTIONS, AgreedCall, Facts, Parts, Transport


class MessageRounds(Transport):
    """See ``Transport``, and ``comm/rounds.py`` for the messages and the order of sums."""

    name = "messages in log2(n) rounds"

    @staticmethod
    def suits(call: Signature, facts: Facts) -> bool:
        may_sum = not (call.operation in REDUCTIONS and facts.in_rank_order) and call.operation != "all_to_all"
        between_nodes = facts.host and not facts.one_node
        return may_sum and between_nodes and facts.size < facts.tuning.at_once * facts.ranks

    def __init__(self, call: AgreedCall) -> None:
        super().__init__(call)
        self._ranks, self._tag = call.ranks, tag(call.number, DATA)

    def all_gather(self, x: np.ndarray, parts: Parts) -> Steps:
        yield from carry(self._ranks, Payload(x, parts, gather_rounds(self.rank, self.size)), self._tag)

    def reduce_scatter(self, x: np.ndarray, parts: Parts, out: np.ndarray, reduction: str) -> Steps:
        wide, combined = accumulated_in(x.dtype), "sum" if reduction == "mean" else reduction
        sums = Payload(x.astype(wide), parts, reduce_rounds(self.rank, self.size), reducer(combined, wide, np))
        yield from carry(self._ranks, sums, self._tag)
        total = sums.x[parts[self.rank]]
        out[...] = total / wide.type(self.size) if reduction == "mean" else total

    def broadcast(self, x: np.ndarray, root: int) -> Steps:
        rounds = broadcast_rounds(self.rank, self.size, root)
        yield from carry(self._ranks, Payload(x, [slice(0, x.size)], rounds), self._tag)
