"""Vertical CNN: each rank has some consecutive layers of a convolutional network, and sends images to the next rank."""

from spmd_engine.strategies.pipeline import Pipeline
from spmd_engine.strategies.two_convolutions import conv, conv_input, conv_weight
from spmd_engine.strategies.two_layers import relu


class VerticalCNN(Pipeline):
    """l is split over ``pipe``, as in ``Pipeline``. Layers are x + conv(relu(conv(x, w0)), w1), 3 x 3.

    Write * for a convolution, i and j for the rows and columns of its window.

    Forward of one micro-batch, on stage i of n
        1. x[b h w c] = Receive from stage i-1                       (on stage 0, the images)
        2. for l in l/pipe: z[b h w f] = x[b h w c] * w0[l i j c f], x[b h w c] += relu(z[b h w f]) * w1[l i j f c]
        3. begin to Send x[b h w c] to stage i+1                     (on stage n-1, return it)
    Backward of one micro-batch
        4. dx[b h w c] = Receive from stage i+1                      (on stage n-1, the output's gradient)
        5. for l in l/pipe, the last one first:
               dw1[l i j f c] = relu(z) · dx,                        dz = the input gradient of dx * w1 where z > 0
               dw0[l i j c f] = x · dz,                              dx += the input gradient of dz * w0
        6. begin to Send dx[b h w c] to stage i-1
    Step
        7. one forward, one backward, as in ``Pipeline``

    Every stage has complete feature maps, but only its layers' weights: for networks with most weights in late layers,
    where maps are small.

    Cost for each of n ranks, in numbers, with P = 18 l c f parameters
        sent    b h w c a micro-batch to each neighbour
        held    P/n parameters, P/n gradients, P/n of each kind of optimizer state
        saved   l/n b h w (c + f) a micro-batch, of at most min(n-i, m) of them

    After Huang et al., "GPipe" (2019), with a convolutional network as first model, here in the order of ``Pipeline``.
    """

    sample = "b h w c"
    kernel = (3, 3)
    shardings = {"layers/w0": "l/pipe i j c f", "layers/w1": "l/pipe i j f c"}
    input_sharding = output_sharding = "b h w c"

    def forward(self, x):
        if self.stage > 0:
            x = self.receive(self.stage - 1, over="pipe", label="x")
        for w0, w1 in zip(self.w0, self.w1, strict=True):
            z = conv(x, w0)
            self.tape.push(x, z)
            x = x + conv(relu(z), w1)
        if self.stage == self.last_stage:
            return x
        self._begin_to_send(self.stage + 1, x, "x")
        return None

    def backward(self, grads):
        dx = grads if self.stage == self.last_stage else self.receive(self.stage + 1, over="pipe", label="dx")
        dw0, dw1 = self.xp.empty_like(self.w0), self.xp.empty_like(self.w1)
        for l in reversed(range(len(self.w0))):
            x, z = self.tape.pop()
            dw1[l] = conv_weight(relu(z), dx)
            dz = conv_input(dx, self.w1[l], x.shape[1]) * (z > 0)
            dw0[l] = conv_weight(x, dz)
            dx = dx + conv_input(dz, self.w0[l], x.shape[1])
        if self.stage > 0:
            self._begin_to_send(self.stage - 1, dx, "dx")
        self.input_gradient = dx if self.stage == 0 else None
        return {"layers/w0": dw0, "layers/w1": dw1}
