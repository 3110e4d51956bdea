"""Shardings: letters name the dims of an array, mesh axes shard them, and collectives go over them.

A *placement* says which rectangles of which global arrays each rank has: blocks of a sharding, rows, zigzag
sequences, stages of a pipeline, on any set of ranks. An element has one owner; other ranks may have copies of it,
replicas or halos. ``plan_transfer(source, target)`` plans the exchange from one placement to another: each rank
receives the elements that it lacks, once, in pieces of bounded memory. ``plan.execute(group, blocks)`` runs the plan;
``plan.adjoint()`` sends back along the same routes and adds. ``reshard``, an engine's ``gather`` and halos of
convolutions are such transfers:

    places = all_positions(mesh.axes)
    source = Placement({"x": ArrayPlacement.of_spec("h/data w", shape, dtype, places)})
    target = Placement({"x": ArrayPlacement.of_spec("h/data w", shape, dtype, places, halos={"h": (1, 1)})})
    plan = plan_transfer(source, target)
    padded = plan.execute(mesh.group(), {"x": [x]})["x"][0]
    dx = plan.adjoint().execute(mesh.group(), {"x": [d_padded]})["x"][0]
"""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.sharding.experts import even, greedy, imbalance, moved, rebalanced, routing_table
    from spmd_engine.sharding.layout import Layout, Spec
    from spmd_engine.sharding.placement import ArrayPlacement, Placement
    from spmd_engine.sharding.rectangles import Rectangle
    from spmd_engine.sharding.resharding import gather, reshard, reshard_plan, shard
    from spmd_engine.sharding.shards import Shards
    from spmd_engine.sharding.transfer import TransferPlan, plan_transfer

__all__ = [
    "ArrayPlacement",
    "Layout",
    "Placement",
    "Rectangle",
    "Shards",
    "Spec",
    "TransferPlan",
    "even",
    "gather",
    "greedy",
    "imbalance",
    "moved",
    "plan_transfer",
    "rebalanced",
    "reshard",
    "reshard_plan",
    "routing_table",
    "shard",
]

__getattr__ = imported_when_asked(__name__)
