"""Ranks of a mesh and helper ranks beside them, in threads."""

from spmd_engine import run_threads
from spmd_engine.axes import count_ranks
from spmd_engine.comm.mesh import mesh_beside
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.helpers import follow_orders, helper_ranks


def calls_and_bytes(ledger):
    return {line: (entry.calls, entry.sent) for line, entry in ledger.entries.items() if entry.calls}


def on_mesh_and_helpers(model, composition, program):
    """``program(engine)`` on the ranks of the mesh; on helper ranks their ledgers."""

    helpers = helper_ranks(composition.assigned)

    def run():
        opened = mesh_beside(helpers, composition.mesh, order=composition.order, timeout=60.0)
        with opened as mesh, mesh.others:
            engine = build_engine(model, mesh, composition)
            if mesh.others.have_this:
                assert follow_orders(engine) == {}
                return calls_and_bytes(mesh.ledger)
            return program(engine)

    return run_threads(run, count_ranks(composition.mesh) + len(helpers))
