"""Sequence parallel: tensor parallel inside layers; between layers each rank has a part of the sequence."""

from spmd_engine.arrays import einsum
from spmd_engine.strategies.two_layers import TwoLayers, relu


class SequenceParallel(TwoLayers):
    """f is split over ``model`` inside, s over the same axis outside: y[b s d] = relu(x[b s d] · w0[d f]) · w1[f d].

    Forward
        1. x[b s d] = AllGather_model(x[b s/model d])
        2. z[b s f/model] = x[b s d] · w0[d f/model]; free x[b s d]
        3. y[b s d] {U_model} = relu(z[b s f/model]) · w1[f/model d],    y[b s/model d] = ReduceScatter_model(...)
    Backward
        4. begin x[b s d] = AllGather_model(x[b s/model d]),             dy[b s d] = AllGather_model(dy[b s/model d])
        5. dz[b s f/model] = dy[b s d] · w1[f/model d] where z > 0
        6. dx[b s d] {U_model} = dz[b s f/model] · w0[d f/model],        begin dx[b s/model d] = ReduceScatter_model
        7. dw1[f/model d] = relu(z[b s f/model]) · dy[b s d]
        8. dw0[d f/model] = x[b s d] · dz[b s f/model]

    The AllReduces of ``TensorParallel`` are split into their halves; layers between these (norms, dropout, residual
    sums) have s/model of the work and of the memory. Their weights, such as a norm's gain g[d], would have unreduced
    gradients dg[d] {U_model}.

    Cost for each of n ranks, in numbers, with P = 2 d f parameters
        sent    5 b s d (n-1)/n a micro-batch: as much as TensorParallel, and b s d to gather x again
        held    P/n parameters, P/n gradients, P/n of each kind of optimizer state
        saved   b s (d + f) / n

    After Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), section 4.2.2.
    """

    sample = "b s d"
    axes = ("model",)
    shardings = {"layer_0/weights": "d f/model", "layer_1/weights": "f/model d"}
    input_sharding = output_sharding = "b s/model d"

    def forward(self, x):
        gathered_x = self.all_gather(x, axis=1, over="model", label="x")
        z = einsum("bsd,df->bsf", gathered_x, self.w0)
        self.tape.push(x, z)
        y = einsum("bsf,fd->bsd", relu(z), self.w1)
        return self.reduce_scatter(y, axis=1, over="model", label="y")

    def backward(self, grads):
        x, z = self.tape.pop()
        gathering_x = self.start_all_gather(x, axis=1, over="model", label="x")  # needed last
        dy = self.all_gather(grads, axis=1, over="model", label="dy")
        dz = einsum("bsd,fd->bsf", dy, self.w1) * (z > 0)
        dx = einsum("bsf,df->bsd", dz, self.w0)
        summing_dx = self.start_reduce_scatter(dx, axis=1, over="model", label="dx")  # while the rest is computed
        dw1 = einsum("bsf,bsd->fd", relu(z), dy)
        dw0 = einsum("bsd,bsf->df", gathering_x.wait(), dz)
        self.input_gradient = summing_dx.wait()
        return {"layer_0/weights": dw0, "layer_1/weights": dw1}
