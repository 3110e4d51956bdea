"""Ranks and what passes between them: communicators, the mesh of named axes, collectives, the ledger.

Below it are the memory and signals that a node's processes share (``node``), and what ranks write down for others to
see why they wait (``watchdog``).

The way of one blocking ``mesh.all_reduce(x)``. ``Mesh.group`` gives the Group of the axes, whose operations all go
through ``Calls._call`` (and those that are started, through ``Calls._begin``). It looks up the PreparedCall of such
calls, or makes it (``collectives``, where each operation is a class): signature, result's shape, sizes for the ledger.
On one node, where each rank has a core, a call that was made before and is small is done at once (``Calls._at_once``):
signature and data are written to this rank's entry of the SlotTable, everyone's entries are read, and summed in rank
order. So are larger ones of other operations, whose data are read where they lie. Otherwise ``Calls._start`` hands the
call's ``steps``, a generator, to Progress as an Operation, and ``wait`` takes all of this rank's operations on until
this one is done. The ranks agree on the call (``call_agreement``): on one node in the table, where they also show their
arrays; between nodes in log2(n) messages (``dissemination``), of which small arrays are a part. Then ``ways.way``, a
pure function of what all now know, says which of ``transports`` moves the data (``routing``). What is left is to copy
the result to where it is wanted; the ledger has its entry, and the table's slot is free again, when the call ends.
"""

from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.communicators.threads import run_threads
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import Pending
from spmd_engine.comm.world import world

__all__ = ["Communicator", "Group", "Ledger", "Mesh", "Pending", "run_threads", "world"]
