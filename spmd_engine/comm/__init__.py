"""Ranks and what passes between them: communicators, the mesh of named axes, collectives, the ledger.

The way of one blocking ``mesh.all_reduce(x)``. ``Mesh.group`` gives the Group of the axes; its ``all_reduce`` looks up
the call's Plan, or makes it (``reductions``): header, result's shape, sizes for the ledger. On one node, a small call
that was made before is done at once: header and data are written to this rank's row of the Board, everyone's rows are
read, and summed in rank order (``Door._at_once``). Otherwise ``Door._begin`` numbers the call and hands its steps, a
generator, to Progress, and ``wait`` takes all of this rank's operations on until this one is done. On one node the
steps meet on the board, where arrays are shown, not copied (``meeting``), and reduce them where they lie (``shared``).
Between nodes (``between_nodes``) ranks agree in log2(n) messages (``dissemination``), of which small arrays are a
part; ``ways.way``, a pure function of what all then know, says which of ``transports`` moves larger ones. What is left
is to copy the result to where it is wanted; the ledger has its entry, and the board's page is free again, when the
operation ends.
"""

from spmd_engine.comm.communicator import Communicator
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import Pending
from spmd_engine.comm.threads import run
from spmd_engine.comm.world import world

__all__ = ["Communicator", "Group", "Ledger", "Mesh", "Pending", "run", "world"]
