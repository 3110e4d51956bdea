"""Eager PyTorch on one rank; with `"compile": true` in the configuration, torch.compile. A worker of `bench_peers.py`.

It compiles with the default mode and static shapes, in the first step, which is warm-up.
"""

import torch
from peers_protocol import read_config
from peers_torch import build_model, train

if __name__ == "__main__":
    config = read_config()
    model = build_model(config)
    train(config, torch.compile(model, dynamic=False) if config.get("compile") else model)
