"""A GPT-2 in plain eager PyTorch: the independent reference, and the model of the PyTorch peers in benchmarks.

It uses nothing of the engine. `make_golden.py` writes golden vectors with this model, and the
workers of `bench_peers.py` train it to compare its speed with the engine's.

Letters in shapes: b batch, s sequence, d width, h heads, k head width, f hidden, v vocabulary,
p positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal multi-head self-attention with one fused query-key-value projection."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x):
        """[b s d] -> [b s d]."""
        b, s, d = x.shape
        q, k, v = (
            part.view(b, s, self.heads, d // self.heads).transpose(1, 2)  # b h s k
            for part in self.qkv(x).split(d, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(b, s, d))


class MLP(nn.Module):
    """Two linear layers around a tanh-approximated GELU, f = 4 d."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        """[b s d] -> [b s d]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width, heads):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=1e-5)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-5)
        self.mlp = MLP(width)

    def forward(self, x):
        """[b s d] -> [b s d]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """GPT-2 without dropout, initialised as GPT-2 is; the head is the token table if `tied`."""

    def __init__(self, vocabulary, context, layers, width, heads, tied=True):
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self):
        """GPT-2's init: normal(0.02), residual projections / sqrt(2 layers), biases 0, norms 1 and 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        for block in self.blocks:
            for residual in (block.attention.output, block.mlp.down):
                nn.init.normal_(residual.weight, std=0.02 / math.sqrt(2 * len(self.blocks)))

    def forward(self, tokens):
        """Tokens [b s] -> logits [b s v]."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        table = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(self.norm(x), table)


def cross_entropy(logits, targets, mask=None):
    """Mean cross-entropy of logits [b s v] at targets [b s], over the tokens where mask [b s] is true."""
    if mask is None:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return (losses * mask).sum() / mask.sum()


def adamw_groups(model, weight_decay):
    """AdamW's parameter groups: decay on tables and weight matrices, none on biases and norms."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def _views(model, pick):
    """The engine's names and shapes for `pick(parameter)`, each a view of what `pick` returned."""
    out = {
        "embedding/table": pick(model.embedding.weight),  # v d
        "positions/table": pick(model.positions.weight),
    }  # p d
    for i, block in enumerate(model.blocks):
        attention, mlp, heads = block.attention, block.mlp, block.attention.heads
        at = f"block{i}/attention"
        out[f"{at}/norm/scale"] = pick(block.attention_norm.weight)  # d
        out[f"{at}/norm/shift"] = pick(block.attention_norm.bias)  # d
        weights = pick(attention.qkv.weight).chunk(3)  # each (h k) d
        biases = pick(attention.qkv.bias).chunk(3)  # each (h k)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            out[f"{at}/{name}"] = weight.T.unflatten(1, (heads, -1))  # d h k
            out[f"{at}/{name}_bias"] = bias.unflatten(0, (heads, -1))  # h k
        out[f"{at}/output"] = pick(attention.output.weight).T.unflatten(0, (heads, -1))  # h k d
        out[f"{at}/output_bias"] = pick(attention.output.bias)  # d
        at = f"block{i}/mlp"
        out[f"{at}/norm/scale"] = pick(block.mlp_norm.weight)  # d
        out[f"{at}/norm/shift"] = pick(block.mlp_norm.bias)  # d
        out[f"{at}/w0"] = pick(mlp.up.weight).T  # d f
        out[f"{at}/b0"] = pick(mlp.up.bias)  # f
        out[f"{at}/w1"] = pick(mlp.down.weight).T  # f d
        out[f"{at}/b1"] = pick(mlp.down.bias)  # d
    out["norm/scale"] = pick(model.norm.weight)  # d
    out["norm/shift"] = pick(model.norm.bias)  # d
    if model.head is not None:
        out["head/table"] = pick(model.head.weight)  # v d
    return out


def parameters_by_name(model):
    """Every parameter under the engine's name and shape, as a detached view of the model's own."""
    return _views(model, lambda parameter: parameter.detach())


def gradients_by_name(model):
    """Every gradient under the engine's name and shape, as a view; call it after backward()."""
    return _views(model, lambda parameter: parameter.grad)


def load_by_name(model, values):
    """Copy `values`, a tensor or array for every engine name, into the model's parameters."""
    views = parameters_by_name(model)
    if views.keys() != values.keys():
        raise KeyError(f"names differ: {sorted(views.keys() ^ values.keys())}")
    for name, view in views.items():
        value = torch.as_tensor(values[name])
        if value.shape != view.shape:
            raise ValueError(f"{name}: shape {tuple(value.shape)}, expected {tuple(view.shape)}")
        view.copy_(value)
