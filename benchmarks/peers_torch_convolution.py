"""A convolution and its gradients in eager PyTorch: a worker of `bench_peers.py`. `peers_convolution.py` defines a
step.

Channels come first, PyTorch's default, or with `"channels_last": true` last in memory, which is faster.
"""

from time import process_time

import torch
import torch.nn.functional as F
from peers_convolution import make_arrays
from peers_protocol import print_result, read_config, time_steps


def main():
    config = read_config()
    of = config["convolution"]
    torch.set_num_threads(config["threads"])
    layout = torch.channels_last if config.get("channels_last") else torch.contiguous_format
    x, w, dy = map(torch.from_numpy, make_arrays(config))
    x, dy = (image.permute(0, 3, 1, 2).contiguous(memory_format=layout) for image in (x, dy))
    w = w.permute(3, 2, 0, 1).contiguous(memory_format=layout).requires_grad_()
    x.requires_grad_(of["input_gradient"])

    def step(_):
        x.grad = w.grad = None
        F.conv2d(x, w, None, of["stride"], of["padding"]).backward(dy)
        return w.grad.abs().mean().item()

    print_result(config, [time_steps(config, step, clock=process_time)], f"PyTorch {torch.__version__}")


if __name__ == "__main__":
    main()
