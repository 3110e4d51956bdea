"""Column parallel with gathered output: each rank has some columns of every weight, and gathers outputs."""

from spmd_engine.arrays import einsum
from spmd_engine.comm.notation import Spec
from spmd_engine.strategies.two_layers import TwoLayers, relu


class ColumnParallel(TwoLayers):
    """The columns of each weight are split over ``model``: f of w0[d f], d of w1[f d]. Layer inputs are unsharded.

    Forward
        1. z[b f/model] = x[b d] · w0[d f/model]
        2. h[b f] = AllGather_model(relu(z[b f/model]))
        3. y[b d/model] = h[b f] · w1[f d/model],                    y[b d] = AllGather_model(...)
    Backward
        4. dy[b d/model] = this rank's columns of dy[b d]
        5. dh[b f] {U_model} = dy[b d/model] · w1[f d/model],        begin dh[b f/model] = ReduceScatter_model(...)
        6. dw1[f d/model] = h[b f] · dy[b d/model]
        7. dz[b f/model] = dh[b f/model] where z > 0
        8. dx[b d] {U_model} = dz[b f/model] · w0[d f/model],        begin dx[b d] = AllReduce_model(...)
        9. dw0[d f/model] = x[b d] · dz[b f/model]

    The adjoint of the gather in 2 is the reduce-scatter in 5; the adjoint of the gather in 3 takes a part (4), because
    every rank has the complete gradient. Layers need not form pairs as in TensorParallel, which sends less if f > d/2.

    Cost for each of n ranks, in numbers, with P = 2 d f parameters
        sent    (2 b f + 3 b d) (n-1)/n a micro-batch
        held    P/n parameters, P/n gradients, P/n of each kind of optimizer state
        saved   b (d + f) + b f / n

    After the column-parallel layers of Shoeybi et al., "Megatron-LM" (2019), section 3, here with gathered outputs.
    """

    axes = ("model",)
    shardings = {"layer_0/weights": "d f/model", "layer_1/weights": "f d/model"}
    input_sharding = output_sharding = "b d"

    def forward(self, x):
        z = einsum("bd,df->bf", x, self.w0)
        h = self.all_gather(relu(z), axis=1, over="model", label="h")
        self.tape.push(x, z, h)
        return self.all_gather(einsum("bf,fd->bd", h, self.w1), axis=1, over="model", label="y")

    def backward(self, grads):
        x, z, h = self.tape.pop()
        dy = grads[Spec.parse("b d/model").block(grads.shape, self.mesh)]
        dh = einsum("bd,fd->bf", dy, self.w1)
        summing_dh = self.start_reduce_scatter(dh, axis=1, over="model", label="dh")  # while dw1 is computed
        dw1 = einsum("bf,bd->fd", h, dy)
        dz = summing_dh.wait() * (z > 0)
        summing_dx = self.start_all_reduce(einsum("bf,df->bd", dz, self.w0), over="model", label="dx")
        dw0 = einsum("bd,bf->df", x, dz)
        self.input_gradient = summing_dx.wait()
        return {"layer_0/weights": dw0, "layer_1/weights": dw1}
