"""PyTorch's FSDP2, fully_shard, over gloo: a worker of `bench_peers.py`, started by torch.distributed.run.

As its documentation recommends, each block is sharded as a unit, then the rest of the model. Parameters are freed after
a block's forward and gathered again for its backward (`reshard_after_forward=True`: ZeRO-3, as in the engine). Those of
the root stay, because the backward needs them at once. A forward prefetches the next block's parameters, the default.
"""

import torch.distributed as dist
from peers_protocol import read_config
from peers_torch import build_model, join_ranks, leave_ranks, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if __name__ == "__main__":
    config = read_config()
    join_ranks()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build_model(config)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    train(config, model)
    leave_ranks()
