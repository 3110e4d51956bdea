"""Arrays cut anew where cuts are by weights: every pair, and no byte too many."""

from itertools import product

import numpy as np
import pytest

from spmd_engine.axes import all_positions
from spmd_engine.sharding import Spec, gather, reshard, reshard_plan, shard
from support.on_ranks import assert_same
from support.resharding import numbered, on_mesh

WEIGHTED = ["b s f", "b/data s f", "b/data:3:1 s f", "b s/data:1:2 f/model:0:1", "b/model,data:1:4 s f", "b s f/model"]


def elements(spec, shape, place):
    """The numbers of the elements that a rank has."""
    return set(numbered(shape)[spec.block(shape, place)].ravel().tolist())


@pytest.mark.parametrize("told", [True, False], ids=["shape-told", "shape-asked"])
def test_every_pair_by_weights(told):
    whole, axes = numbered((7, 6, 5)), {"data": 2, "model": 2}

    def body(mesh):
        for source, target in product(WEIGHTED, WEIGHTED):
            mesh.ledger.clear()
            plan, x = reshard_plan(source, target, mesh.axes), shard(whole, source, mesh)
            result = reshard(x, source, target, mesh, shape=whole.shape if told else None, label="moved")
            assert_same(result, shard(whole, target, mesh), source, target)
            assert_same(gather(x, source, mesh), np.asarray(whole))
            if told:
                mesh.ledger.clear()
                plan.do(x, mesh, shape=whole.shape)
                assert mesh.ledger.total().sent == plan.sent(whole.shape, whole.dtype, mesh.coordinates)

    on_mesh(axes, body)
    for source, target in product(WEIGHTED, WEIGHTED):
        plan = reshard_plan(source, target, axes)
        ranks = all_positions(axes)
        specs = Spec.parse(source), Spec.parse(target)
        old, new = ([elements(spec, whole.shape, rank) for rank in ranks] for spec in specs)
        sent = sum(plan.sent(whole.shape, np.int8, rank.coordinates) for rank in ranks)
        assert sent == sum(len(there - here) for here, there in zip(old, new, strict=True))
