"""Steps of a ResNet-18 in eager PyTorch: a worker of `bench_peers.py`. `peers_images.py` defines a step.

Channels come first, PyTorch's default, or with `"channels_last": true` last in memory.
"""

from time import process_time

import torch
from peers_images import make_images
from peers_protocol import print_result, read_config, time_steps
from torch import nn


class Block(nn.Module):
    def __init__(self, into, width, stride):
        super().__init__()
        self.branch = nn.Sequential(*normed(into, width, 3, stride), nn.ReLU(), *normed(width, width, 3, 1))
        self.shortcut = nn.Sequential(*normed(into, width, 1, stride)) if stride > 1 or into != width else nn.Identity()

    def forward(self, x):
        return torch.relu(self.branch(x) + self.shortcut(x))


def normed(into, out, kernel, stride):
    """A convolution with its batch norm."""
    return nn.Conv2d(into, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)


def resnet18(channels, classes):
    blocks, width = [], 64
    for stage in range(4):
        for stride in (2 if stage else 1, 1):
            blocks.append(Block(width, 64 << stage, stride))
            width = 64 << stage
    stem = *normed(channels, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def main():
    config = read_config()
    of = config["images"]
    torch.set_num_threads(config["threads"])
    torch.manual_seed(config["seed"])
    layout = torch.channels_last if config.get("channels_last") else torch.contiguous_format
    x, targets = map(torch.from_numpy, make_images(config))
    x = x.permute(0, 3, 1, 2).contiguous(memory_format=layout)
    model = resnet18(of["channels"], of["classes"]).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), config["learning_rate"], config["momentum"])

    def step(_):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=config.get("precision") == "bfloat16"):
            loss = nn.functional.cross_entropy(model(x), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    print_result(config, [time_steps(config, step, clock=process_time)], f"PyTorch {torch.__version__}")


if __name__ == "__main__":
    main()
