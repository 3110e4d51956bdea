"""3-D hybrid: a pipeline whose stages are replicated, and whose replicas are tensor parallel."""

from spmd_engine.arrays import einsum
from spmd_engine.strategies.pipeline import Pipeline
from spmd_engine.strategies.two_layers import relu


class Hybrid(Pipeline):
    """l is split over ``pipe``, b over ``data``, f over ``model``, as in the pages on these axes.

    Write B for b/data, F for f/model. Ranks send to the rank of the next stage with equal data and model coordinates.

    Forward of one micro-batch, on stage i of p
        1. x[B d] = Receive from stage i-1                           (on stage 0, the input)
        2. for l in l/pipe: z[B F] = x[B d] · w0[l d F]
               r[B d] {U_model} = relu(z[B F]) · w1[l F d],          x[B d] += AllReduce_model(...)
        3. begin to Send x[B d] to stage i+1                         (on stage p-1, return it)
    Backward of one micro-batch
        4. dx[B d] = Receive from stage i+1                          (on stage p-1, the output's gradient)
        5. for l in l/pipe, the last one first:
               dz[B F] = dx[B d] · w1[l F d] where z > 0
               dr[B d] {U_model} = dz[B F] · w0[l d F],              begin dr[B d] = AllReduce_model(...)
               dw1[l F d] {U_data} += relu(z[B F]) · dx[B d]
               dw0[l d F] {U_data} += x[B d] · dz[B F]
               dx[B d] += dr[B d]
        6. begin to Send dx[B d] to stage i-1
    Step
        7. one forward, one backward, as in ``Pipeline``
        8. dw0[l d F] = AllReduce_data(dw0[l d F] {U_data}),         likewise dw1[l F d]

    Cost for each of p x n x t ranks (pipe, data, model), in numbers, with P = 2 l d f parameters
        sent    4 (l/p) (b/n) d (t-1)/t a micro-batch over ``model``, (b/n) d to each neighbour over ``pipe``;
                2 P/(p t) (n-1)/n a step over ``data``
        held    P/(p t) parameters, P/(p t) gradients, P/(p t) of each kind of optimizer state
        saved   l/p (b/n) (d + f/t) a micro-batch, of at most p-i of them

    After Narayanan et al., "Efficient large-scale language model training on GPU clusters" (2021), section 3.
    """

    axes = ("pipe", "data", "model")
    shardings = {"layers/w0": "l/pipe d f/model", "layers/w1": "l/pipe f/model d"}
    input_sharding = output_sharding = "b/data d"

    def forward(self, x):
        if self.stage > 0:
            x = self.receive(self.stage - 1, over="pipe", label="x")
        for w0, w1 in zip(self.w0, self.w1, strict=True):
            z = einsum("bd,df->bf", x, w0)
            self.tape.push(x, z)
            x = x + self.all_reduce(einsum("bf,fd->bd", relu(z), w1), over="model", label="r")
        if self.stage == self.last_stage:
            return x
        self._begin_to_send(self.stage + 1, x, "x")
        return None

    def backward(self, grads):
        """The gradients of this rank's samples only: ``step`` sums them over ``data`` once."""
        dx = grads if self.stage == self.last_stage else self.receive(self.stage + 1, over="pipe", label="dx")
        dw0, dw1 = self.xp.empty_like(self.w0), self.xp.empty_like(self.w1)
        for l in reversed(range(len(self.w0))):
            x, z = self.tape.pop()
            dz = einsum("bd,fd->bf", dx, self.w1[l]) * (z > 0)
            summing_dr = self.start_all_reduce(einsum("bf,df->bd", dz, self.w0[l]), over="model", label="dr")
            einsum("bf,bd->fd", relu(z), dx, out=dw1[l])
            einsum("bd,bf->df", x, dz, out=dw0[l])
            dx = dx + summing_dr.wait()
        if self.stage > 0:
            self._begin_to_send(self.stage - 1, dx, "dx")
        self.input_gradient = dx if self.stage == 0 else None
        return {"layers/w0": dw0, "layers/w1": dw1}

    def step(self, batch, loss=None):
        value = super().step(batch, loss)
        self.gradients = {
            name: self.all_reduce(gradient, over="data", label=name) for name, gradient in self.gradients.items()
        }
        return value
