"""Sharded optimizer (ZeRO stage 1): every rank has the complete model, but updates only some rows."""

from spmd_engine.arrays import einsum
from spmd_engine.comm.notation import Spec
from spmd_engine.strategies.two_layers import TwoLayers, relu


class ShardedOptimizer(TwoLayers):
    """b and the rows of the optimizer's parameters are split over ``data``.

    Forward
        1. z[b/data f] = x[b/data d] · w0[d f]
        2. y[b/data d] = relu(z[b/data f]) · w1[f d]
    Backward
        3. dw1[f d] {U_data} += relu(z[b/data f]) · dy[b/data d]
        4. dz[b/data f] = dy[b/data d] · w1[f d] where z > 0
        5. dw0[d f] {U_data} += x[b/data d] · dz[b/data f]
        6. dx[b/data d] = dz[b/data f] · w0[d f]
    After the last micro-batch
        7. dw0[d/data f] = ReduceScatter_data(dw0[d f] {U_data}),    likewise dw1[f/data d]
        8. the optimizer updates w0[d/data f] and w1[f/data d]
        9. w0[d f] = AllGather_data(w0[d/data f]),                   likewise w1[f d]

    Steps 7 and 9 are the two halves of an AllReduce, with the update between them.

    Cost for each of n ranks, in numbers, with P = 2 d f parameters
        sent    2 P (n-1)/n a step, for any number of micro-batches
        held    P parameters, P gradients until 7, P/n of each kind of optimizer state
        saved   b (d + f) / n

    After Rajbhandari et al., "ZeRO" (2020), section 5.1.
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
        """The gradients of this rank's samples only: ``step`` sums them over ranks once."""
        x, z = self.tape.pop()
        dw1 = einsum("bf,bd->fd", relu(z), grads)
        dz = einsum("bd,fd->bf", grads, self.w1) * (z > 0)
        dw0 = einsum("bd,bf->df", x, dz)
        self.input_gradient = einsum("bf,df->bd", dz, self.w0)
        return {"layer_0/weights": dw0, "layer_1/weights": dw1}

    def step(self, batch, loss=None):
        value = super().step(batch, loss)  # accumulates the gradients of micro-batches
        self.gradients = {
            name: self.reduce_scatter(gradient, over="data", label=name) for name, gradient in self.gradients.items()
        }
        return value

    def after_update(self):
        for name, rows in self.owned.items():
            self.group("data").all_gather(rows, out=self.parameters[name], label=name)
