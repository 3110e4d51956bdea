"""Fully sharded (ZeRO stage 3): every rank has some rows of the weights, and gathers all rows while it uses them."""

from spmd_engine.arrays import einsum
from spmd_engine.strategies.two_layers import TwoLayers, relu


class FullySharded(TwoLayers):
    """b and the rows of the stored weights are split over ``data``; ranks compute with gathered weights.

    Forward
        1. w0[d f] = AllGather_data(w0[d/data f])
        2. begin w1[f d] = AllGather_data(w1[f/data d])
        3. z[b/data f] = x[b/data d] · w0[d f]; free w0[d f]
        4. y[b/data d] = relu(z[b/data f]) · w1[f d]; free w1[f d]
    Backward
        5. begin w1[f d] = AllGather_data(w1[f/data d])
        6. dw1[f d] {U_data} = relu(z[b/data f]) · dy[b/data d],     begin dw1[f/data d] = ReduceScatter_data(...)
        7. dz[b/data f] = dy[b/data d] · w1[f d] where z > 0; free w1[f d]
        8. begin w0[d f] = AllGather_data(w0[d/data f])
        9. dw0[d f] {U_data} = x[b/data d] · dz[b/data f],           begin dw0[d/data f] = ReduceScatter_data(...)
       10. dx[b/data d] = dz[b/data f] · w0[d f]; free w0[d f]

    Cost for each of n ranks, in numbers, with P = 2 d f parameters
        sent    3 P (n-1)/n a micro-batch: 1.5 times as much as data parallel
        held    P/n parameters, P/n gradients, P/n of each kind of optimizer state;
                in addition, at most two gathered weights and their gradients, d f each
        saved   b (d + f) / n

    After Rajbhandari et al., "ZeRO" (2020), section 5.3, and Zhao et al., "PyTorch FSDP" (2023).
    """

    axes = ("data",)
    shardings = {"layer_0/weights": "d/data f", "layer_1/weights": "f/data d"}
    input_sharding = output_sharding = "b/data d"

    def forward(self, x):
        w0 = self.all_gather(self.w0, over="data", label="w0")
        gathering_w1 = self.start_all_gather(self.w1, over="data", label="w1")  # while z is computed
        z = einsum("bd,df->bf", x, w0)
        del w0
        self.tape.push(x, z)
        return einsum("bf,fd->bd", relu(z), gathering_w1.wait())

    def backward(self, grads):
        x, z = self.tape.pop()
        gathering_w1 = self.start_all_gather(self.w1, over="data", label="w1")  # while dw1 is computed
        dw1 = einsum("bf,bd->fd", relu(z), grads)
        summing_dw1 = self.start_reduce_scatter(dw1, over="data", label="dw1")
        dz = einsum("bd,fd->bf", grads, gathering_w1.wait()) * (z > 0)
        del gathering_w1, dw1
        gathering_w0 = self.start_all_gather(self.w0, over="data", label="w0")  # while dw0 is computed
        summing_dw0 = self.start_reduce_scatter(einsum("bd,bf->df", x, dz), over="data", label="dw0")
        self.input_gradient = einsum("bf,df->bd", dz, gathering_w0.wait())
        return {"layer_0/weights": summing_dw0.wait(), "layer_1/weights": summing_dw1.wait()}
