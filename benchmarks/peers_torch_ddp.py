"""PyTorch's DistributedDataParallel over gloo: a worker of `bench_peers.py`, started by torch.distributed.run.

Settings: gradients are views of the buckets, which saves a copy; the graph is static, which saves the search for unused
parameters; `bucket_cap_mb` of the configuration is in MiB. Smaller buckets overlap more of the communication with the
backward, larger ones need fewer calls: `bench_peers.py` runs PyTorch's default, 25, and one bucket for all gradients,
and the faster one counts.
"""

from peers_protocol import read_config
from peers_torch import build_model, join_ranks, leave_ranks, train
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    config = read_config()
    join_ranks()
    model = DistributedDataParallel(
        build_model(config), gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=config["bucket_cap_mb"]
    )
    train(config, model)
    leave_ranks()
