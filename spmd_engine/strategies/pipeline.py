"""Pipeline: each rank has some consecutive layers, and sends micro-batches to the next rank."""

from spmd_engine.arrays import einsum
from spmd_engine.engine.batch import Scores
from spmd_engine.strategies.layer_stack import LayerStack
from spmd_engine.strategies.two_layers import relu


class Pipeline(LayerStack):
    """l is split over ``pipe``. No sum is over l, so nothing is unreduced; but each layer waits for the previous one.

    Forward of one micro-batch, on stage i of n
        1. x[b d] = Receive from stage i-1                           (on stage 0, the input)
        2. for l in l/pipe: z[b f] = x[b d] · w0[l d f],             x[b d] += relu(z[b f]) · w1[l f d]
        3. begin to Send x[b d] to stage i+1                         (on stage n-1, return it)
    Backward of one micro-batch
        4. dx[b d] = Receive from stage i+1                          (on stage n-1, the output's gradient)
        5. for l in l/pipe, the last one first:
               dw1[l f d] = relu(z[b f]) · dx[b d],                  dz[b f] = dx[b d] · w1[l f d] where z > 0
               dw0[l d f] = x[b d] · dz[b f],                        dx[b d] += dz[b f] · w0[l d f]
        6. begin to Send dx[b d] to stage i-1
    Step of m micro-batches: one forward, one backward (1F1B)
        7. stage i makes min(n-1-i, m) forwards, until the first gradient can be back;
           then a forward and a backward in turn while there are forwards; then the other backwards

    A stage is idle for (n-1)/(m+n-1) of the time if all take equally long. In ``step`` a stage may send forward while
    the next one sends backward, so neither waits for its sends until the end of the step.

    Cost for each of n ranks, in numbers, with P = 2 l d f parameters
        sent    b d a micro-batch to each neighbour
        held    P/n parameters, P/n gradients, P/n of each kind of optimizer state
        saved   l/n (b d + b f) a micro-batch, of at most min(n-i, m) of them

    After Narayanan et al., "PipeDream" (2019), section 3.2, in the form with one version of the weights of "Memory-
    efficient pipeline-parallel DNN training" (2021).
    """

    axes = ("pipe",)
    shardings = {"layers/w0": "l/pipe d f", "layers/w1": "l/pipe f d"}
    input_sharding = output_sharding = "b d"
    sending = ()  #: unfinished sends to other stages

    @property
    def stage(self):
        return self.mesh.index("pipe")

    @property
    def last_stage(self):
        return self.mesh.axis_size("pipe") - 1

    def forward(self, x):
        if self.stage > 0:
            x = self.receive(self.stage - 1, over="pipe", label="x")
        for w0, w1 in zip(self.w0, self.w1, strict=True):
            z = einsum("bd,df->bf", x, w0)
            self.tape.push(x, z)
            x = x + einsum("bf,fd->bd", relu(z), w1)
        if self.stage == self.last_stage:
            return x
        self._begin_to_send(self.stage + 1, x, "x")
        return None

    def backward(self, grads):
        dx = grads if self.stage == self.last_stage else self.receive(self.stage + 1, over="pipe", label="dx")
        dw0, dw1 = self.xp.empty_like(self.w0), self.xp.empty_like(self.w1)
        for l in reversed(range(len(self.w0))):
            x, z = self.tape.pop()
            einsum("bf,bd->fd", relu(z), dx, out=dw1[l])
            dz = einsum("bd,fd->bf", dx, self.w1[l]) * (z > 0)
            einsum("bd,bf->df", x, dz, out=dw0[l])
            dx = dx + einsum("bf,df->bd", dz, self.w0[l])
        if self.stage > 0:
            self._begin_to_send(self.stage - 1, dx, "dx")
        self.input_gradient = dx if self.stage == 0 else None
        return {"layers/w0": dw0, "layers/w1": dw1}

    def step(self, batch, loss=None):
        scores, count, micro_batches = Scores(loss or self.loss, {}), self.count(batch), len(batch.micro_batches)
        ahead = min(self.last_stage - self.stage, micro_batches)  # forwards before the first backward
        gradients = {name: self.new_state(weights) for name, weights in self.parameters.items()}
        for turn in range(micro_batches + ahead):
            dy = None  # except on the last stage, where a forward and its backward are in one turn
            if turn < micro_batches:
                micro = self._on_own_backend(batch.micro_batches[turn])
                with self.micro_batch(turn):
                    y = self.forward(micro.inputs)
                if y is not None:
                    dy = self._gradient_of_loss(scores, y, micro, count)
            if turn >= ahead:
                with self.micro_batch(turn - ahead):
                    for name, gradient in self.backward(dy).items():
                        gradients[name] += gradient
        self.gradients = gradients
        return self._take_scores(scores, count)

    def _begin_to_send(self, stage, x, label):
        unfinished = [sending for sending in self.sending if not sending.done]
        self.sending = [*unfinished, self.start_send(stage, x, over="pipe", label=label)]

    def _sum_shares(self, shares):
        """Sum the shares of the loss over the batch axes, and send the sum of the last stage to all stages."""
        for sending in self.sending:
            sending.wait()
        return self.all_reduce(shares, over=(*self.batch_axes, "pipe"), label="loss")
