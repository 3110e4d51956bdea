"""Replicate x shard (hybrid sharded data parallel): fully sharded inside groups of ranks, which are replicas."""

from spmd_engine.arrays import einsum
from spmd_engine.strategies.two_layers import TwoLayers, relu


class ReplicateShard(TwoLayers):
    """b is split over ``replicate`` and ``shard``, the rows of the stored weights over ``shard`` only.

    Write B for b/replicate,shard.

    Forward
        1. w0[d f] = AllGather_shard(w0[d/shard f]),                 begin w1[f d] = AllGather_shard(w1[f/shard d])
        2. z[B f] = x[B d] · w0[d f]
        3. y[B d] = relu(z[B f]) · w1[f d]
    Backward
        4. begin w1[f d] = AllGather_shard(w1[f/shard d])
        5. dw1[f d] {U_replicate,shard} = relu(z[B f]) · dy[B d],    begin dw1[f/shard d] {U_replicate} = ReduceScatter
        6. dz[B f] = dy[B d] · w1[f d] where z > 0
        7. begin w0[d f] = AllGather_shard(w0[d/shard f])
        8. dw0[d f] {U_replicate,shard} = x[B d] · dz[B f],          begin dw0[d/shard f] {U_replicate} = ReduceScatter
        9. dx[B d] = dz[B f] · w0[d f]
       10. dw1[f/shard d] = AllReduce_replicate(...),                dw0[d/shard f] = AllReduce_replicate(...)

    Cost for each rank, with r replicas of n shards each, in numbers, with P = 2 d f parameters
        sent    3 P (n-1)/n a micro-batch over ``shard``, the mesh's last axis, which stays inside a node if it fits;
                2 (P/n) (r-1)/r over ``replicate``
        held    P/n parameters, P/n gradients, P/n of each kind of optimizer state; gathered weights as in FullySharded
        saved   b (d + f) / (r n)

    After Zhao et al., "PyTorch FSDP" (2023), section 3.2.2.
    """

    axes = ("replicate", "shard")
    shardings = {"layer_0/weights": "d/shard f", "layer_1/weights": "f/shard d"}
    input_sharding = output_sharding = "b/replicate,shard d"

    def forward(self, x):
        w0 = self.all_gather(self.w0, over="shard", label="w0")
        gathering_w1 = self.start_all_gather(self.w1, over="shard", label="w1")  # while z is computed
        z = einsum("bd,df->bf", x, w0)
        del w0
        self.tape.push(x, z)
        return einsum("bf,fd->bd", relu(z), gathering_w1.wait())

    def backward(self, grads):
        x, z = self.tape.pop()
        gathering_w1 = self.start_all_gather(self.w1, over="shard", label="w1")  # while dw1 is computed
        dw1 = einsum("bf,bd->fd", relu(z), grads)
        scattering_dw1 = self.start_reduce_scatter(dw1, over="shard", label="dw1")
        dz = einsum("bd,fd->bf", grads, gathering_w1.wait()) * (z > 0)
        del gathering_w1, dw1
        gathering_w0 = self.start_all_gather(self.w0, over="shard", label="w0")  # while dw0 is computed
        scattering_dw0 = self.start_reduce_scatter(einsum("bd,bf->df", x, dz), over="shard", label="dw0")
        self.input_gradient = einsum("bf,df->bd", dz, gathering_w0.wait())
        dw1 = self.all_reduce(scattering_dw1.wait(), over="replicate", label="dw1")
        dw0 = self.all_reduce(scattering_dw0.wait(), over="replicate", label="dw0")
        return {"layer_0/weights": dw0, "layer_1/weights": dw1}
