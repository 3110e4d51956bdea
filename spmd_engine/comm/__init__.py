"""Ranks and their communication: communicators, the mesh of named axes, collectives, the ledger.

The path of a blocking ``mesh.all_reduce(x)`` through the files:

1. ``group``: the Group of the axes (``Mesh.group``) looks up the PreparedCall, or prepares one, and numbers the call
   (``Group._run``; ``start_...``: ``Group._begin``). Its ``steps`` become an Operation, unless it repeats a small call
   on one node, where each rank has a core: then the other ranks arrive before it would have to wait (``_repeat``).
2. ``pending``: advances all operations of this rank until this one is done.
3. ``calls``: the ``steps`` of all collectives. ``collectives`` implements the parts that differ: an operation's
   signature, the arrays that ranks offer, how data move, and the result.
4. ``agreement.call_agreement``: all ranks agree on the call, on one node in the slot table, between nodes in a tree
   of messages, which also carry small arrays.
5. ``dispatch``: ``choose`` gives the transport, a pure function of facts that all ranks now know.
6. ``transports``: one file for each moves the data; ``rounds`` has the schedule of messages between nodes,
   ``shared_memory.slot_table`` implements a node's exchange.

``connections`` has what the ranks of a communicator use besides its messages.

When the call ends, the rank writes the ledger and releases the slot.
"""

from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.communicators.threads import run_threads
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import Pending
from spmd_engine.comm.world import world

__all__ = ["Communicator", "Group", "Ledger", "Mesh", "Pending", "run_threads", "world"]
