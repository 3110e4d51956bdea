"""Data parallel: every rank has the complete model and a part of the batch."""

from spmd_engine.arrays import einsum
from spmd_engine.strategies.two_layers import TwoLayers, relu


class DataParallel(TwoLayers):
    """b is split over ``data``. Sums over b are unreduced, {U_data}: the weights' gradients.

    Forward
        1. z[b/data f] = x[b/data d] · w0[d f]
        2. y[b/data d] = relu(z[b/data f]) · w1[f d]
    Backward
        3. dw1[f d] {U_data} = relu(z[b/data f]) · dy[b/data d],     begin dw1[f d] = AllReduce_data(...)
        4. dz[b/data f] = dy[b/data d] · w1[f d] where z > 0
        5. dw0[d f] {U_data} = x[b/data d] · dz[b/data f],           dw0[d f] = AllReduce_data(...)
        6. dx[b/data d] = dz[b/data f] · w0[d f]

    Cost for each of n ranks, in numbers, with P = 2 d f parameters
        sent    2 P (n-1)/n a micro-batch
        held    P parameters, P gradients, P of each kind of optimizer state, as on one device
        saved   b (d + f) / n

    After Li et al., "PyTorch Distributed" (2020), section 3.2: gradients are sent while others are computed.
    """

    axes = ("data",)
    shardings = {"layer_0/weights": "d f", "layer_1/weights": "f d"}
    input_sharding = output_sharding = "b/data d"

    def forward(self, x):
        z = einsum("bd,df->bf", x, self.w0)
        self.tape.push(x, z)
        return einsum("bf,fd->bd", relu(z), self.w1)

    def backward(self, grads):
        x, z = self.tape.pop()
        dw1 = einsum("bf,bd->fd", relu(z), grads)
        summing_dw1 = self.start_all_reduce(dw1, over="data", label="dw1")  # while dz and dw0 are computed
        dz = einsum("bd,fd->bf", grads, self.w1) * (z > 0)
        dw0 = self.all_reduce(einsum("bd,bf->df", x, dz), over="data", label="dw0")
        self.input_gradient = einsum("bf,df->bd", dz, self.w0)
        return {"layer_0/weights": dw0, "layer_1/weights": summing_dw1.wait()}
