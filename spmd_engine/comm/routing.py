"""How the calls of a group go: ranks agree, and a transport moves the data, in the way that ``ways`` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.agreement.call_agreement import Agreed, Agreement
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.dispatch import Facts, Way, between_nodes, way, within_node
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.spans import spans
from spmd_engine.comm.transports.hierarchical import Hierarchical
from spmd_engine.comm.transports.messages import Messages
from spmd_engine.comm.transports.shared_memory import SharedMemory, readable
from spmd_engine.comm.transports.transport import GatherAndReduce, Transport

if TYPE_CHECKING:
    from spmd_engine.comm.collectives import PreparedCall


class Routing:
    """Of one group."""

    def __init__(self, comm: Communicator, axes: str, check: bool, deterministic: bool) -> None:
        self.comm, self.agreement, self._deterministic = comm, Agreement(comm, axes, check), deterministic
        self.node_table, self.one_node, self._lanes = comm.node_table, comm.table is not None, comm.lanes

    def shows(self, call: PreparedCall, own: Array, size: int) -> bool:
        """Whether this rank offers the others of its node to read its data: arrays of ``size`` bytes."""
        if self.node_table is None or not isinstance(own, np.ndarray):
            return False
        return not call.signature.inline and (self.one_node or size >= self.comm.tuning.hierarchical)

    def readable(self, call: PreparedCall, x: Array) -> np.ndarray | None:
        """What this rank shows to the others of its node of contiguous ``x``: itself, a copy of it, or nothing."""
        sliced = call.sliced and self.one_node
        return readable(self.node_table, x, self.comm.tuning, sliced) if self.shows(call, x, x.nbytes) else None

    def numbers(self, number: int, mine: Sequence[int]) -> Steps:
        """One number from each rank, of which this one gives each ``mine``, in call ``number``."""
        sent, comes = np.array(mine, np.int64), np.empty(len(mine), np.int64)
        each = spans([1] * len(mine))
        library = self.comm.collectives
        data = library.of_call(number, False) if library is not None else Messages(self.comm, number)
        yield from data.all_to_all(sent, each, comes, each, last=False)
        comes[self.comm.rank] = sent[self.comm.rank]
        return comes.tolist()

    def transport(self, call: PreparedCall, number: int, agreed: Agreed, size: int) -> GatherAndReduce:
        """What moves the data of a call on which all have agreed: ``size`` bytes, of all ranks or of each."""
        comm, tuning, met = self.comm, self.comm.tuning, agreed.met
        facts = Facts(
            call.signature.operation,
            size,
            comm.size,
            call.signature.axis,
            one_node=self.one_node,
            by_nodes=self._lanes is not None,
            library=comm.collectives is not None,
            lengths_known=agreed.alike or agreed.sizes_known,
            shown=met is not None and met.shown,
            host=agreed.host,
        )
        match way(facts, tuning):
            case Way.SHARED_MEMORY:
                return met
            case Way.HIERARCHICAL:
                return Hierarchical(self._lanes, self._local(call, number, met), self._lane(number, facts))
            case Way.MPI:
                return comm.collectives.of_call(number, self._deterministic)
        comm.turns.over(number)
        return Messages(comm, number)

    def _local(self, call: PreparedCall, number: int, met: SharedMemory) -> GatherAndReduce:
        """What moves a hierarchical call's data within this node."""
        shown = met.results_shown if call.signature.operation == "all_gather" else met.shown
        return met if within_node(shown) is Way.SHARED_MEMORY else Messages(self._lanes.local, number)

    def _lane(self, number: int, facts: Facts) -> Transport:
        """What moves the data of a lane: of each node's bytes, its part."""
        lanes, library, size = self._lanes, self.comm.lane_collectives, facts.size // self._lanes.local.size
        facts = facts._replace(size=size, ranks=lanes.lane.size, library=library is not None)
        if between_nodes(facts, size, self.comm.tuning) is Way.MPI:
            return library.of_call(number, self._deterministic)
        self.comm.turns.over(number)
        return Messages(lanes.lane, number)
