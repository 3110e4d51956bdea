"""The training step of all PyTorch workers of `bench_peers.py`: models, optimizer and loop; each worker wraps the
model.

It uses PyTorch's fast paths in eager mode: fused optimizers (one call for all parameters of a group, not a loop in
Python), scaled_dot_product_attention (flash attention on the CPU), fused GELU, layer norm and cross-entropy, and
gradients set to None instead of zeros. The configuration sets the number of threads, one in all comparisons. A rank's
loss is that of its own shard of the batch, without the reduction that the engine does.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers_protocol import make_batches, print_result, time_steps
from torch import nn
from torch_gpt import GPT, adamw_groups


def build_model(config):
    """The model with parameters that depend on the seed alone: equal on all ranks."""
    torch.set_num_threads(config["threads"])
    torch.manual_seed(config["seed"])
    if "sizes" not in config:
        return GPT(config["vocabulary"], config["context"], config["layers"], config["width"], config["heads"])
    layers = []
    for inputs, outputs in zip(config["sizes"][:-1], config["sizes"][1:], strict=True):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        nn.init.normal_(layers[-2].weight, std=(2 / inputs) ** 0.5)  # as in the engine, so that losses can be compared
        nn.init.zeros_(layers[-2].bias)
    nn.init.normal_(layers[-2].weight, std=config["sizes"][-2] ** -0.5)
    return nn.Sequential(*layers[:-1])


def make_optimizer(model, config):
    if "sizes" in config:
        return torch.optim.SGD(model.parameters(), lr=config["learning_rate"], fused=True)
    return torch.optim.AdamW(
        adamw_groups(model, config["weight_decay"]),
        lr=config["learning_rate"],
        betas=tuple(config["betas"]),
        eps=config["epsilon"],
        fused=True,
    )


def train(config, model):
    """Train and print the result; with a process group, each rank has its shard of the batch."""
    device, precision = config.get("device", "cpu"), config.get("precision", "float32")
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    model.to(device)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer = make_optimizer(model, config)
    rows = config["batch_size"] // ranks
    batches = [
        [torch.from_numpy(part[rank * rows : (rank + 1) * rows]).to(device) for part in batch]
        for batch in make_batches(config)
    ]

    def step(index):
        inputs, targets = batches[index % len(batches)]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            outputs = model(inputs)
            loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        loss.backward()
        if config["clip_norm"]:
            nn.utils.clip_grad_norm_(model.parameters(), config["clip_norm"])
        optimizer.step()
        return loss.item()

    memory = torch.cuda.max_memory_allocated if device == "cuda" else None
    barrier = dist.barrier if ranks > 1 else lambda: None
    results = [torch.from_numpy(time_steps(config, step, barrier, memory=memory))]
    if ranks > 1:
        mine, results = results[0], [torch.empty_like(results[0]) for _ in range(ranks)]
        dist.all_gather(results, mine)
    if rank == 0:
        print_result(config, torch.stack(results).numpy(), f"PyTorch {torch.__version__}")


def join_ranks():
    """The process group of the ranks that torch.distributed.run started: gloo, the backend for CPUs."""
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the fastest between ranks of one machine
    dist.init_process_group("gloo")


def leave_ranks():
    """End the process when all ranks are done, without teardown: if a thread of gloo still runs when a process group is
    destroyed at exit, it sometimes aborts the process ("terminate called ...")."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
