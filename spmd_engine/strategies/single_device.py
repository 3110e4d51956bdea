"""Single device: the algorithm that every other page must reproduce."""

from spmd_engine.arrays import einsum
from spmd_engine.strategies.two_layers import TwoLayers, relu


class SingleDevice(TwoLayers):
    """Nothing is sharded; each of several ranks computes everything.

    Forward
        1. z[b f] = x[b d] · w0[d f]
        2. y[b d] = relu(z[b f]) · w1[f d]
    Backward
        3. dw1[f d] = relu(z[b f]) · dy[b d]
        4. dz[b f]  = dy[b d] · w1[f d] where z > 0
        5. dw0[d f] = x[b d] · dz[b f]
        6. dx[b d]  = dz[b f] · w0[d f]

    Cost, in numbers, with P = 2 d f parameters
        sent    nothing
        held    P parameters, P gradients, P of each kind of optimizer state
        saved   b (d + f)
    """

    shardings = {"layer_0/weights": "d f", "layer_1/weights": "f d"}
    input_sharding = output_sharding = "b d"

    def forward(self, x):
        z = einsum("bd,df->bf", x, self.w0)
        self.tape.push(x, z)
        return einsum("bf,fd->bd", relu(z), self.w1)

    def backward(self, grads):
        x, z = self.tape.pop()
        dw1 = einsum("bf,bd->fd", relu(z), grads)
        dz = einsum("bd,fd->bf", grads, self.w1) * (z > 0)
        dw0 = einsum("bd,bf->df", x, dz)
        self.input_gradient = einsum("bf,df->bd", dz, self.w0)
        return {"layer_0/weights": dw0, "layer_1/weights": dw1}
