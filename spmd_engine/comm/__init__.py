"""Ranks and what passes between them: communicators, the mesh of named axes, collectives, the ledger."""

from spmd_engine.comm.communicator import Communicator
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import Pending
from spmd_engine.comm.threads import run
from spmd_engine.comm.world import world

__all__ = ["Communicator", "Group", "Ledger", "Mesh", "Pending", "run", "world"]
