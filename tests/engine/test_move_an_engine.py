"""The parameters of a running engine, moved to one on another mesh of the same ranks."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.sharding import plan_transfer
from support import tiny

WAYS = [
    ({"data": 4}, {"zero": 3}, {"pipe": 2, "data": 2}, {"zero": 1}),
    ({"pipe": 2, "model": 2}, {}, {"data": 2, "context": 2}, {"zero": 3}),
    ({"data": 2, "model": 2}, {"zero": 3, "group_threshold": 0}, {"model": 4}, {}),
    ({"data": 4}, {}, {"data": 4}, {"zero": 3}),
]


@pytest.mark.parametrize("axes, options, others, new_options", WAYS, ids=[f"{a}-{b}" for a, _, b, _ in WAYS])
def test_all_parameters_move_at_once(axes, options, others, new_options):
    def program():
        with Mesh(**axes) as mesh, Mesh(**others) as other:
            old, new = tiny.make_engine(mesh, **options), tiny.make_engine(other, **new_options)
            for part in old.parameters.values():
                part *= 3
            whole = {name: old.gather(name) for name in old.names}
            source, target = old.placement().checked(), new.placement().checked()
            assert source[old.names[0]].shape == old.global_shape(old.names[0])
            plan = plan_transfer(source, target, piece_bytes=1000)
            for part in new.parameters.values():
                part[...] = np.nan
            mesh.ledger.clear()
            blocks, out = ({name: [part] for name, part in each.parameters.items()} for each in (old, new))
            plan.execute(mesh.group(), blocks, out=out)
            assert mesh.ledger.total().sent == plan.bytes_sent(mesh.rank)
            for name in new.names:
                np.testing.assert_array_equal(new.gather(name), whole[name], strict=True)
            return plan.bytes_received(mesh.rank)

    nothing_moves = axes == {"data": 4} and not options  # replicas have it all
    assert any(run_threads(program, 4)) != nothing_moves
