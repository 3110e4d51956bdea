"""Write `tests/golden/resnet_tiny.npz`, golden vectors of two tiny residual networks computed by PyTorch.

    pip install torch==2.13.0 numpy
    python scripts/make_golden_resnet.py

`basic` has a 7 x 7 stem with stride 2 and 3 x 3 max pooling, and basic blocks; `bottleneck` has a 3 x 3 stem and
bottleneck blocks. Both have stages of 1 and 2 blocks with 3 and 6 channels, on 17 x 14 images with 3 channels in 5
classes. They train for three steps in float64 with SGD (learning rate 0.1, momentum 0.9, no decay) on one batch of 6,
in two micro-batches of 3: each micro-batch is normalised by its own statistics, and the loss is the mean over the 6.

The file holds, for each NETWORK and for NAME, the engine's name of a parameter or buffer, with the engine's dims
(weights k l i o; those of the head i o):

    NETWORK/initial/NAME    parameters: seeded normals with std 0.3, norm scales 1 + such a normal
    NETWORK/gradient/NAME   of the loss of the first step, over both micro-batches
    NETWORK/final/NAME      parameters after the last step, and running means and variances
    NETWORK/losses          one per step, before its update
    NETWORK/scores          b k, of the batch after the last step, in evaluation mode: with the running statistics
    inputs, targets         b h w c; b
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

PATH = Path(__file__).resolve().parent.parent / "tests" / "golden" / "resnet_tiny.npz"
WIDTH, BLOCKS, CLASSES, BATCH, STEPS, RATE, MOMENTUM, SEED = 3, (1, 2), 5, 6, 3, 0.1, 0.9, 20260722


class Way(nn.Sequential):
    """Convolutions, each with a batch norm, with ReLU between them."""

    def __init__(self, *convolutions):
        steps = {}
        for i, (into, out, kernel, stride) in enumerate(convolutions):
            if i:
                steps[f"relu{i - 1}"] = nn.ReLU()
            steps[f"conv{i}"] = nn.Conv2d(into, out, kernel, stride, padding=kernel // 2, bias=False)
            steps[f"norm{i}"] = nn.BatchNorm2d(out)
        super().__init__()
        for name, step in steps.items():
            self.add_module(name, step)


class Block(nn.Module):
    def __init__(self, into, width, stride, bottleneck):
        super().__init__()
        self.out = 4 * width if bottleneck else width
        if bottleneck:
            self.branch = Way((into, width, 1, 1), (width, width, 3, stride), (width, self.out, 1, 1))
        else:
            self.branch = Way((into, width, 3, stride), (width, width, 3, 1))
        self.shortcut = Way((into, self.out, 1, stride)) if stride > 1 or into != self.out else None

    def forward(self, x):
        return torch.relu(self.branch(x) + (self.shortcut(x) if self.shortcut else x))


class ResNet(nn.Module):
    def __init__(self, bottleneck, large):
        super().__init__()
        self.large = large
        self.stem = Way((3, WIDTH, 7, 2) if large else (3, WIDTH, 3, 1))
        blocks, channels = [], WIDTH
        for stage, count in enumerate(BLOCKS):
            for k in range(count):
                blocks.append(Block(channels, WIDTH << stage, 2 if stage and not k else 1, bottleneck))
                channels = blocks[-1].out
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x):
        """[b c h w] -> [b k]."""
        x = torch.relu(self.stem(x))
        if self.large:
            x = F.max_pool2d(x, 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def engine_name(name):
    """`blocks.0.branch.conv1.weight` is `block0/residual/branch/conv1/weights`."""
    *path, leaf = name.split(".")
    if path[0] == "blocks":
        path = [f"block{path[1]}", "residual", *path[2:]]
    if path[0] == "stem" or "shortcut" in path:
        path[-1] = path[-1].removesuffix("0")
    kind = "norm" if path[-1].startswith("norm") else "other"
    leaf = {
        ("norm", "weight"): "scale", ("norm", "bias"): "shift", ("other", "weight"): "weights",
        ("norm", "running_mean"): "mean", ("norm", "running_var"): "variance",
    }.get((kind, leaf), leaf)  # fmt: skip
    return "/".join([*path, leaf])


def engine_array(array):
    """The array with the engine's order of dims, contiguous."""
    array = array.detach().numpy()
    return np.ascontiguousarray(array.transpose({4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}[array.ndim]))


def state(network, buffers):
    arrays = dict(network.named_parameters())
    if buffers:
        arrays |= {name: b for name, b in network.named_buffers() if not name.endswith("num_batches_tracked")}
    return {engine_name(name): engine_array(array) for name, array in arrays.items()}


def golden(network, x, targets, generator):
    """The content of the file for one network."""
    with torch.no_grad():
        for name, p in network.named_parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
            if engine_name(name).endswith("scale"):
                p += 1
    out = {f"initial/{name}": array.copy() for name, array in state(network, buffers=False).items()}
    optimizer = torch.optim.SGD(network.parameters(), RATE, momentum=MOMENTUM)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
            loss = F.cross_entropy(network(x[part]), targets[part], reduction="sum") / BATCH
            loss.backward()
            total += loss.item()
        if not step:
            out |= {
                f"gradient/{engine_name(name)}": engine_array(p.grad).copy() for name, p in network.named_parameters()
            }
        losses.append(total)
        optimizer.step()
    network.eval()
    out |= {f"final/{name}": array.copy() for name, array in state(network, buffers=True).items()}
    return out | {"losses": np.array(losses), "scores": network(x).detach().numpy()}


def main():
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn((BATCH, 3, 17, 14), generator=generator)
    targets = torch.randint(CLASSES, (BATCH,), generator=generator)
    arrays = {"inputs": np.ascontiguousarray(x.numpy().transpose(0, 2, 3, 1)), "targets": targets.numpy()}
    for name, network in (("basic", ResNet(False, True)), ("bottleneck", ResNet(True, False))):
        golden_arrays = golden(network, x, targets, generator)
        arrays |= {f"{name}/{key}": array for key, array in golden_arrays.items()}
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH}: {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
