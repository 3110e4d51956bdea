"""Ranks of a mesh and helper ranks beside them, in threads."""

import numpy as np

from spmd_engine import run_threads
from spmd_engine.comm.mesh import mesh_without
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.helper_job import Helpers, build_helper, serve
from spmd_engine.engine.helpers import helper_ranks


def calls_and_bytes(ledger):
    return {line: (entry.calls, entry.sent) for line, entry in ledger.entries.items() if entry.calls}


def on_mesh_and_helpers(model, composition, program):
    """``program(engine)`` on the ranks of the mesh; on helper ranks their ledgers."""

    helpers = helper_ranks(composition.assigned)

    def run():
        with mesh_without(helpers, composition.mesh, order=composition.order, timeout=60.0) as mesh:
            if mesh.is_helper:
                assert serve(mesh, lambda order: build_helper(model, mesh, composition)) == 0
                return calls_and_bytes(mesh.ledger)
            with Helpers(mesh) as started:
                engine = build_engine(model, mesh, composition)
                started.start({}, engine.first_owners)
                return program(engine)

    ranks = int(np.prod(list(composition.mesh.values()))) + len(helpers)
    return run_threads(run, ranks)
