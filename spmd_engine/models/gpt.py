"""GPT: a decoder-only transformer with pre-norm blocks, after GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import sqrt

from spmd_engine.errors import UsageError
from spmd_engine.layers import MLP, Attention, Embedding, Head, LayerNorm, Positions, Residual
from spmd_engine.layers.attention.context import context_method as method_called
from spmd_engine.losses import cross_entropy
from spmd_engine.models.mixture import Mixture
from spmd_engine.models.model import Model

BYTES = 257  # every byte, and the end of a file


@dataclass(frozen=True)
class GPTSize:
    """The shape of a GPT."""

    layers: int
    width: int  #: d
    heads: int  #: h
    context: int  #: longest s
    vocabulary: int = BYTES  #: v
    hidden: int | None = None  #: f; None: 4 d
    tied: bool = True  #: whether the head uses the embedding's table
    key_value_heads: int | None = None  #: heads of keys and values, each shared by as many queries; None: all
    mixture: Mixture | None = None  #: experts in the place of MLPs; None: all are dense
    epsilon: float = 1e-5  #: of layer norms


GPT_SIZES = {
    "gpt-nano": GPTSize(layers=8, width=96, heads=6, context=128),
    "gpt-mini": GPTSize(layers=6, width=384, heads=6, context=256),
    "gpt2": GPTSize(layers=12, width=768, heads=12, context=1024, vocabulary=50257),
    # as much work for each token as those of their names
    "gpt-moe-nano": GPTSize(layers=8, width=96, heads=6, context=128, mixture=Mixture()),
    "gpt-moe-mini": GPTSize(layers=6, width=384, heads=6, context=256, mixture=Mixture()),
    # as published: GPT-2 (Radford et al., 2019) and GPT-3 (Brown et al., 2020); Megatron's of arXiv 2205.05198
    "gpt2-xl": GPTSize(48, 1600, 25, 1024, 50257),
    "gpt-1b": GPTSize(80, 1024, 16, 128),
    "megatron-22b": GPTSize(48, 6144, 64, 2048, 51200),
    "gpt3-175b": GPTSize(96, 12288, 96, 2048, 51200),
    "turing-530b": GPTSize(105, 20480, 128, 2048, 51200),
    "megatron-1t": GPTSize(128, 25600, 160, 2048, 51200),
}


def gpt(size: GPTSize, name: str = "gpt", dropout: float = 0.0, context_method: str = "gather") -> Model:
    """Tokens[b s] to logits[b s v]. ``dropout`` applies to the embedding's sum and to every residual branch.

    Initial weights are normal with deviation 0.02, those that end a branch with 0.02 / sqrt(2 layers). How
    queries meet keys where a layout cuts s is the ``context_method``: gather, ring or ulysses.
    """
    if size.width % size.heads:
        raise UsageError(f"{name}: width {size.width} is not a multiple of {size.heads} heads")
    if size.key_value_heads is not None and (size.key_value_heads < 1 or size.heads % size.key_value_heads):
        raise UsageError(f"{name}: {size.heads} heads cannot share {size.key_value_heads} heads of keys and values")
    if not 0.0 <= dropout < 1.0:
        raise UsageError(f"dropout {dropout} must be at least 0 and below 1")
    d, v, hidden = size.width, size.vocabulary, size.hidden or 4 * size.width
    out_std = 0.02 / sqrt(2 * size.layers)
    context, norm = method_called(context_method), partial(LayerNorm, d, size.epsilon)
    layers = [("embedding", Embedding(v, d)), ("positions", Positions(size.context, d, dropout=dropout))]
    for i in range(size.layers):
        attention = Attention(d, size.heads, size.key_value_heads, context=context, out_std=out_std)
        layers.append((f"block{i}/attention", Residual(norm(), attention, dropout)))
        if size.mixture is not None and size.mixture.is_routed(i, size.layers):
            moe = size.mixture.layer(d, hidden, out_std)
            layers.append((f"block{i}/moe", Residual(norm(), moe, dropout)))
        else:
            layers.append((f"block{i}/mlp", Residual(norm(), MLP(d, hidden, out_std=out_std), dropout)))
    layers.append(("norm", norm()))
    layers.append(("head", Head(v, d, tied="embedding/table" if size.tied else None)))
    return Model(name, tuple(layers), "b s", "b s v", "b s", token_loss(v), size.context, v)


def token_loss(vocabulary: int):
    """Cross-entropy of logits[b s v], which may be cut over v."""

    def loss(sh, outputs, targets, **options):
        axes = sh.axes("v")
        over = sh.mesh.group(axes) if axes else None
        return cross_entropy(outputs, targets, over=over, start=sh.span("v", vocabulary).start, **options)

    return loss
