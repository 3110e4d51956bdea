"""Tensor parallel: each rank has a part of every weight, column-parallel then row-parallel."""

from spmd_engine.arrays import einsum
from spmd_engine.strategies.two_layers import TwoLayers, relu


class TensorParallel(TwoLayers):
    """f is split over ``model``. Sums over f are unreduced, {U_model}: the output and the input gradient.

    Forward
        1. z[b f/model] = x[b d] · w0[d f/model]
        2. y[b d] {U_model} = relu(z[b f/model]) · w1[f/model d],    y[b d] = AllReduce_model(...)
    Backward
        3. dz[b f/model] = dy[b d] · w1[f/model d] where z > 0
        4. dx[b d] {U_model} = dz[b f/model] · w0[d f/model],        begin dx[b d] = AllReduce_model(...)
        5. dw1[f/model d] = relu(z[b f/model]) · dy[b d]
        6. dw0[d f/model] = x[b d] · dz[b f/model]

    Columns of w0 and rows of w1 are split equally, so nothing is sent between layers. f need not be a multiple of n.

    Cost for each of n ranks, in numbers, with P = 2 d f parameters
        sent    4 b d (n-1)/n a micro-batch
        held    P/n parameters, P/n gradients, P/n of each kind of optimizer state
        saved   b d + b f / n

    After Shoeybi et al., "Megatron-LM" (2019), section 3.
    """

    axes = ("model",)
    shardings = {"layer_0/weights": "d f/model", "layer_1/weights": "f/model d"}
    input_sharding = output_sharding = "b d"

    def forward(self, x):
        z = einsum("bd,df->bf", x, self.w0)
        self.tape.push(x, z)
        return self.all_reduce(einsum("bf,fd->bd", relu(z), self.w1), over="model", label="y")

    def backward(self, grads):
        x, z = self.tape.pop()
        dz = einsum("bd,fd->bf", grads, self.w1) * (z > 0)
        # dx first: the layer before waits for it, while nothing waits for the weights' gradients.
        summing_dx = self.start_all_reduce(einsum("bf,df->bd", dz, self.w0), over="model", label="dx")
        dw1 = einsum("bf,bd->fd", relu(z), grads)
        dw0 = einsum("bd,bf->df", x, dz)
        self.input_gradient = summing_dx.wait()
        return {"layer_0/weights": dw0, "layer_1/weights": dw1}
