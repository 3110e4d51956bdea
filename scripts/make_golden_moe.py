"""Write `tests/golden/moe_block.npz`, golden vectors of one block with experts, computed by PyTorch.

    pip install torch==2.13.0 numpy
    python scripts/make_golden_moe.py

The block is x + moe(norm(x)): LayerNorm (epsilon 1e-5), a softmax router that takes the best 2 of 5 experts with
renormalised weights, and a shared expert. Each expert is w0, tanh GELU, w1, with width 6 and hidden width 7. Every
expert is computed for every token and multiplied by its weight, which is 0 if it is not chosen. The loss is
mean((y - target)^2), plus 0.1 x the balance loss (E sum f P, f divided by k) and 0.05 x the mean of logsumexp^2.

The file holds, in float64: `x`, `targets` (3 x 4 x 6), `initial/NAME`, `y` and `gradient/NAME` of the first step,
`losses` (auxiliary ones included) and `load` (5 counts) of three steps of AdamW (learning rate 0.05, betas 0.9 and
0.95, epsilon 1e-8, decay 0.1 on matrices), and `final/NAME`.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import gelu, layer_norm, one_hot

PATH = Path(__file__).resolve().parent.parent / "tests" / "golden" / "moe_block.npz"
B, S, D, F, E, K, STEPS = 3, 4, 6, 7, 5, 2, 3
NAMES = ["shared0", *(f"expert{number}" for number in range(E))]


def expert(p, name, x):
    return gelu(x @ p[f"{name}/w0"], approximate="tanh") @ p[f"{name}/w1"]


def block(p, x):
    """y, the sum of the auxiliary losses, and the number of tokens that chose each expert."""
    normed = layer_norm(x, (D,), p["norm/scale"], p["norm/shift"], 1e-5)
    logits = normed @ p["router"]
    scores = logits.softmax(-1)
    best = scores.topk(K, dim=-1)
    chosen = one_hot(best.indices, E).sum(-2)
    weights = scores * chosen
    weights = weights / weights.sum(-1, keepdim=True)
    y = x + expert(p, "shared0", normed)
    y = y + sum(weights[..., e : e + 1] * expert(p, f"expert{e}", normed) for e in range(E))
    load = chosen.sum((0, 1))
    balance = E * (load.double() / (B * S * K) * scores.mean((0, 1))).sum()
    return y, 0.1 * balance + 0.05 * (logits.logsumexp(-1) ** 2).mean(), load


def main():
    torch.manual_seed(3)
    shapes = {"norm/scale": (D,), "norm/shift": (D,), "router": (D, E)}
    shapes |= {f"{name}/w0": (D, F) for name in NAMES} | {f"{name}/w1": (F, D) for name in NAMES}
    p = {name: 0.5 * torch.randn(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    p["norm/scale"] += 1
    x, targets = torch.randn(2, B, S, D, dtype=torch.float64)
    arrays = {"x": x, "targets": targets, **{f"initial/{name}": value.clone() for name, value in p.items()}}
    for value in p.values():
        value.requires_grad_()
    groups = [
        {"params": [value for value in p.values() if value.ndim > 1], "weight_decay": 0.1},
        {"params": [value for value in p.values() if value.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95), eps=1e-8)
    losses, loads = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        y, auxiliary, load = block(p, x)
        loss = ((y - targets) ** 2).mean() + auxiliary
        loss.backward()
        if step == 0:
            arrays["y"] = y.detach()
            arrays |= {f"gradient/{name}": value.grad.clone() for name, value in p.items()}
        losses.append(loss.item())
        loads.append(load.tolist())
        optimizer.step()
    arrays |= {f"final/{name}": value.detach() for name, value in p.items()}
    golden_arrays = {name: value.numpy() for name, value in arrays.items()}
    np.savez_compressed(PATH, losses=np.array(losses), load=np.array(loads), **golden_arrays)


if __name__ == "__main__":
    main()
