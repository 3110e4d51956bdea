"""Channel split: each rank has some of the channels between two convolutions."""

from spmd_engine.strategies.two_convolutions import TwoConvolutions, conv, conv_input, conv_weight
from spmd_engine.strategies.two_layers import relu


class ChannelSplit(TwoConvolutions):
    """f is split over ``model``, as in ``TensorParallel``: output channels of w0, input channels of w1.

    Write * for a convolution, i and j for the rows and columns of its window.

    Forward
        1. z[b h w f/model] = x[b h w c] * w0[i j c f/model]
        2. y[b h w c] {U_model} = relu(z[b h w f/model]) * w1[i j f/model c],  y[b h w c] = AllReduce_model(...)
    Backward
        3. dz[b h w f/model] = the input gradient of dy[b h w c] * w1 where z > 0
        4. dx[b h w c] {U_model} = the input gradient of dz * w0,              begin dx[b h w c] = AllReduce_model(...)
        5. dw1[i j f/model c] = relu(z[b h w f/model]) · dy[b h w c]           window by window
        6. dw0[i j c f/model] = x[b h w c] · dz[b h w f/model]

    Every rank has complete images, so no halos are sent. f need not be a multiple of n.

    Cost for each of n ranks, in numbers, with P = 18 c f parameters
        sent    4 b h w c (n-1)/n a micro-batch
        held    P/n parameters, P/n gradients, P/n of each kind of optimizer state
        saved   b h w (c + f / n)

    After Dryden et al., "Channel and filter parallelism for large-scale CNN training" (2019), section 3, which splits
    channels and filters, here in turn, as in Shoeybi et al., "Megatron-LM" (2019).
    """

    axes = ("model",)
    shardings = {"conv_0/weights": "i j c f/model", "conv_1/weights": "i j f/model c"}
    input_sharding = output_sharding = "b h w c"

    def forward(self, x):
        z = conv(x, self.w0)
        self.tape.push(x, z)
        return self.all_reduce(conv(relu(z), self.w1), over="model", label="y")

    def backward(self, grads):
        x, z = self.tape.pop()
        height = x.shape[1]
        dz = conv_input(grads, self.w1, height) * (z > 0)
        # dx first: the layer before waits for it, while nothing waits for the weights' gradients.
        summing_dx = self.start_all_reduce(conv_input(dz, self.w0, height), over="model", label="dx")
        dw1 = conv_weight(relu(z), grads)
        dw0 = conv_weight(x, dz)
        self.input_gradient = summing_dx.wait()
        return {"conv_0/weights": dw0, "conv_1/weights": dw1}
