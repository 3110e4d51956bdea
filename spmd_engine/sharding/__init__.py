"""Letters: how an array's dims are named, which mesh axes cut them, and collectives spoken in them."""

from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.notation import Spec
from spmd_engine.sharding.reshard import gather, reshard, reshard_plan, shard
from spmd_engine.sharding.shards import Shards

__all__ = ["Layout", "Shards", "Spec", "gather", "reshard", "reshard_plan", "shard"]
