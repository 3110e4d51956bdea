"""Sharded gradients (ZeRO stage 2): as the sharded optimizer, with gradients that are sharded once they are summed."""

from spmd_engine.arrays import einsum
from spmd_engine.comm.notation import Spec
from spmd_engine.strategies.two_layers import TwoLayers, relu


class ShardedGradients(TwoLayers):
    """b and the rows of gradients and of the optimizer's parameters are split over ``data``.

    Forward
        1. z[b/data f] = x[b/data d] · w0[d f]
        2. y[b/data d] = relu(z[b/data f]) · w1[f d]
    Backward
        3. dw1[f d] {U_data} = relu(z[b/data f]) · dy[b/data d],     begin dw1[f/data d] = ReduceScatter_data(...)
        4. dz[b/data f] = dy[b/data d] · w1[f d] where z > 0
        5. dw0[d f] {U_data} = x[b/data d] · dz[b/data f],           dw0[d/data f] = ReduceScatter_data(...)
        6. dx[b/data d] = dz[b/data f] · w0[d f]
    After the last micro-batch
        7. the optimizer updates w0[d/data f] and w1[f/data d]
        8. w0[d f] = AllGather_data(w0[d/data f]),                   likewise w1[f d]

    Ranks accumulate only their rows, so each micro-batch needs a reduction over ranks: the cost of less memory.

    Cost for each of n ranks, in numbers, with P = 2 d f parameters
        sent    P (n-1)/n a micro-batch, P (n-1)/n a step
        held    P parameters, P/n gradients, P/n of each kind of optimizer state;
                while they are being summed, the P gradients of one micro-batch
        saved   b (d + f) / n

    After Rajbhandari et al., "ZeRO" (2020), section 5.2.
    """

    axes = ("data",)
    shardings = {"layer_0/weights": "d f", "layer_1/weights": "f d"}
    rows = {"layer_0/weights": "d/data f", "layer_1/weights": "f/data d"}  # that this rank updates
    input_sharding = output_sharding = "b/data d"

    def owned_sharding(self, name):
        return Spec.parse(self.rows[name])

    @property
    def owned(self):
        return {name: parameter[self.owned_index(name)] for name, parameter in self.parameters.items()}

    def forward(self, x):
        z = einsum("bd,df->bf", x, self.w0)
        self.tape.push(x, z)
        return einsum("bf,fd->bd", relu(z), self.w1)

    def backward(self, grads):
        x, z = self.tape.pop()
        dw1 = einsum("bf,bd->fd", relu(z), grads)
        summing_dw1 = self.start_reduce_scatter(dw1, over="data", label="dw1")  # while dz and dw0 are computed
        dz = einsum("bd,fd->bf", grads, self.w1) * (z > 0)
        dw0 = self.reduce_scatter(einsum("bd,bf->df", x, dz), over="data", label="dw0")
        self.input_gradient = einsum("bf,df->bd", dz, self.w0)
        return {"layer_0/weights": dw0, "layer_1/weights": summing_dw1.wait()}

    def after_update(self):
        for name, rows in self.owned.items():
            self.group("data").all_gather(rows, out=self.parameters[name], label=name)
