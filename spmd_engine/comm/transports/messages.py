"""Transport by messages between two ranks: between nodes, and for device memory; it suits every call."""

from __future__ import annotations

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.exchange import DATA, exchange, tag
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.transports.transport import AgreedCall, Facts, Parts, Transport


class Messages(Transport):
    """See ``Transport``. Sums are always in rank order."""

    name = "messages"

    @staticmethod
    def suits(call: Signature, facts: Facts) -> bool:
        return True

    def __init__(self, call: AgreedCall) -> None:
        super().__init__(call)
        self._ranks, self._tag = call.ranks, tag(call.number, DATA)

    def all_gather(self, x: Array, parts: Parts) -> Steps:
        block = x[parts[self.rank]]
        yield from exchange(self._ranks, [block] * self.size, [x[part] for part in parts], self._tag)

    def all_to_all(self, x: Array, parts: Parts, out: Array, out_parts: Parts) -> Steps:
        outgoing, incoming = [x[part] for part in parts], [out[part] for part in out_parts]
        yield from exchange(self._ranks, outgoing, incoming, self._tag)
