"""Our convolution and its gradients: a worker of `bench_peers.py`. `peers_convolution.py` defines a step."""

from time import process_time

import numpy as np
from bench_worker_ours import version
from peers_convolution import make_arrays
from peers_protocol import print_result, read_config, time_steps

from spmd_engine.arrays.images import conv2d, conv2d_input_gradient, conv2d_weight_gradient
from spmd_engine.arrays.memory import keep_freed_memory
from spmd_engine.arrays.windows import Window


def main() -> None:
    config = read_config()
    of = config["convolution"]
    window = Window(of["kernel"], of["stride"], before=of["padding"], after=of["padding"])
    x, w, dy = make_arrays(config)
    keep_freed_memory()  # as `train` does

    def step(_: int) -> float:
        conv2d(x, w, window, window)
        if of["input_gradient"]:
            conv2d_input_gradient(dy, w, window, window, 1, x.shape[1:3])
        return float(np.abs(conv2d_weight_gradient(x, dy, window, window, 1)).mean())

    print_result(config, [time_steps(config, step, clock=process_time)], version())


if __name__ == "__main__":
    main()
