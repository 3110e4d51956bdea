"""Decoder-only language models, built from a DecoderConfig: Llama, GPT-2 and relatives, with or without experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from math import sqrt
from typing import Any

from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import UsageError
from spmd_engine.layers import (
    MLP,
    Attention,
    AttentionConfig,
    Branch,
    Embedding,
    GatedMLP,
    Head,
    LayerNorm,
    Parallel,
    Positions,
    Residual,
    RMSNorm,
    RotaryOptions,
)
from spmd_engine.layers.attention.context import context_method as method_called
from spmd_engine.layers.attention.qk_norm_rope import rotary_with
from spmd_engine.layers.layer import Layer
from spmd_engine.layers.mlp import ACTIVATIONS, GATES
from spmd_engine.layers.moe.routing import RouterOptions
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.mixture import Mixture, block_numbers
from spmd_engine.models.model import Model, class_loss

BYTES = 257  # every byte, and the end of a file


@dataclass(frozen=True)
class DecoderConfig(Configuration):
    """All that determines what a decoder computes, except parameters. Raises UsageError for invalid combinations.

    The family ``gpt2`` implies learned positions, layer norm, GELU and biases. Other families determine only the names
    of weights in files; the other fields determine the computation. Blocks are listed by number, as in "0,5".
    """

    family: str = setting("llama", choices=tuple(FAMILIES))
    layers: int = setting(8, least=1, most=10_000)
    width: int = setting(96, least=1, most=1 << 24)  #: d
    heads: int = setting(6, least=1, most=1 << 16)  #: heads of queries
    key_value_heads: int | None = setting(None, least=1)  #: heads of keys and values; None: the same number
    head_width: int | None = setting(None, least=1, most=1 << 16)  #: k; None: width / heads
    hidden: int = setting(256, least=1)  #: f, of the dense perceptrons
    vocabulary: int = setting(BYTES, least=1)  #: v
    context: int = setting(128, least=1)  #: longest s
    epsilon: float = setting(1e-6, least=0)  #: added to the variance in norms
    tied: bool = True  #: whether the head uses the embedding's table
    rotary: RotaryOptions = RotaryOptions()
    bias: bool = False  #: whether queries, keys and values have biases
    output_bias: bool = False  #: whether the attention's output has a bias
    qk_norm: bool = setting(False, old_names=("query_key_norm",))  #: whether queries and keys are normalised
    qk_norm_all_heads: bool = setting(False, old_names=("norm_together",))  #: over all heads, not head by head
    mixture: Mixture | None = None  #: experts instead of dense perceptrons; None: no experts
    window: int | None = setting(None, least=1)  #: positions that a query sees, up to its own; None: all
    window_layers: str = setting("", old_names=("windowed",))  #: blocks that have the window; "": all
    #: rotary positions of those blocks; None: the same as in other blocks
    window_rotary: RotaryOptions | None = setting(None, old_names=("rotary_in_window",))
    no_rope_layers: str = setting("", old_names=("unturned",))  #: blocks without rotary positions
    #: whether learned positions are added to the embedding, instead of rotary positions
    learned_positions: bool = setting(False, old_names=("learned",))
    unused_positions: int = setting(0, least=0)  #: rows of their table before the row of the first position
    #: RMSNorm, or LayerNorm: with scale and shift, with a scale alone, or with neither.
    norm: str = setting("rms", choices=("rms", "layer", "layer-scale", "layer-plain"))
    #: The place of the norm in a branch.
    norm_position: str = setting("before", choices=("before", "after", "both"), old_names=("norms",))
    #: Whether attention and perceptron have the same input, and if so how many norms are before them.
    parallel: str = setting("none", choices=("none", "one-norm", "two-norms"))
    gated: bool = True  #: whether dense perceptrons have a gate: three products, not two
    activation: str = setting("silu", choices=tuple(GATES))  #: the function in dense perceptrons, or in their gate
    mlp_bias: bool = setting(False, old_names=("perceptron_bias",))  #: whether dense perceptrons have biases
    embedding_scale: float = 1.0  #: factor of the embedding's rows
    residual_scale: float = 1.0  #: factor of every branch's output
    attention_scale: float | None = None  #: factor of queries times keys; None: 1 / sqrt(k)
    attention_cap: float | None = None  #: scores are cap · tanh(scores / cap); None: no cap
    logits_divisor: float = 1.0  #: logits are divided by it
    logits_cap: float | None = None  #: logits are cap · tanh(logits / cap); None: no cap
    head_bias: bool = False  #: whether logits have a bias
    #: whether queries and keys rotate before they are normalised
    rope_before_norm: bool = setting(False, old_names=("turned_first",))
    #: Instead of rotary positions, scores decrease with the distance of the key: the last head's by 2^-alibi (ALiBi).
    alibi: float | None = setting(None, least=0)
    embedding_norm: bool = False  #: whether a norm follows the embedding

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_width is None and self.width % self.heads:
            raise UsageError(f"width {self.width} is not a multiple of {self.heads} heads; give a head_width")
        if self.heads % (self.key_value_heads or self.heads):
            raise UsageError(f"{self.heads} heads cannot share {self.key_value_heads} heads of keys and values")
        if self.mixture is not None:
            self.mixture.is_routed(0, self.layers)  # raises if `dense` has a number beyond the layers
        for name in ("window_layers", "no_rope_layers"):
            block_numbers(getattr(self, name), name, self.layers)
        if self.logits_divisor == 0:
            raise UsageError("logits_divisor is 0")
        for name in ("attention_cap", "logits_cap"):
            if (cap := getattr(self, name)) is not None and cap <= 0:
                raise UsageError(f"{name} is {cap}: it must be positive, or None for no cap")
        if not self.gated and self.activation not in ACTIVATIONS:
            raise UsageError(f"activation {self.activation!r} is not supported in perceptrons without a gate")
        if self.parallel != "none" and (self.mixture is not None or self.norm_position != "before"):
            raise UsageError("parallel branches need norm_position 'before' and no mixture")
        gated = self.activation == "silu" and self.gated and not self.mlp_bias
        if self.mixture is not None and self.family != "gpt2" and not gated:
            raise UsageError("with experts, all perceptrons must have a gate with silu, and no biases")

    @property
    def width_of_heads(self) -> int:
        """k, also where it follows from the width."""
        return self.head_width or self.width // self.heads

    def has_window(self, block: int) -> bool:
        """Return whether queries of this block see only the window."""
        windowed = block_numbers(self.window_layers, "window_layers")
        return self.window is not None and (not windowed or block in windowed)

    def has_rope(self, block: int) -> bool:
        """Return whether this block has rotary positions."""
        if self.family == "gpt2" or self.learned_positions or self.alibi:
            return False
        return block not in block_numbers(self.no_rope_layers, "no_rope_layers")

    def attention_of(self, block: int) -> AttentionConfig:
        """Return what the attention of this block computes."""
        values = {f.name: getattr(self, f.name) for f in fields(AttentionConfig)}
        window = self.window if self.has_window(block) else None
        rotary = ((window and self.window_rotary) or self.rotary) if self.has_rope(block) else None
        return AttentionConfig(**values | {"window": window, "rotary": rotary})

    def check_rotary(self) -> None:
        """Raise UsageError if the rotary positions of a block do not fit the head width."""
        for block in range(self.layers):
            if (options := self.attention_of(block).rotary) is not None:
                rotary_with(self.width_of_heads, options)


NANO: dict[str, Any] = {"layers": 8, "width": 96, "heads": 6, "key_value_heads": 2}
#: Small models to train from scratch, on bytes.
DECODERS = {
    "llama-nano": DecoderConfig(**NANO),
    "llama-mini": DecoderConfig(layers=6, width=384, heads=6, key_value_heads=2, hidden=1024, context=256),
    "qwen2-nano": DecoderConfig(family="qwen2", bias=True, **NANO),
    "qwen3-nano": DecoderConfig(family="qwen3", qk_norm=True, head_width=24, **NANO),
    "mixtral-nano": DecoderConfig(family="mixtral", mixture=Mixture(hidden=128), **NANO),
    "qwen3-moe-nano": DecoderConfig(
        family="qwen3-moe",
        qk_norm=True,
        mixture=Mixture(hidden=64, router=RouterOptions(top_k=4, balance_loss=0.01, z_loss=0.001)),
        **NANO,
    ),
}


def decoder(shape: DecoderConfig, name: str = "decoder", dropout: float = 0.0, context_method: str = "gather") -> Model:
    """Tokens[b s] to logits[b s v]. ``dropout`` applies to every residual branch, and to learned positions.

    Initial weights are normal with standard deviation 0.02, and 0.02 / sqrt(2 layers) in the last weight of a branch.
    ``context_method`` is the method of attention over a sharded s: gather, ring or ulysses. Raises UsageError.
    """
    if not 0.0 <= dropout < 1.0:
        raise UsageError(f"dropout {dropout} must be at least 0 and below 1")
    shape = shape.changed(**FAMILIES[shape.family].implied)
    d, v = shape.width, shape.vocabulary
    layers: list[tuple[str, Layer]] = [("embedding", Embedding(v, d, scale=shape.embedding_scale))]
    if shape.learned_positions:
        layers.append(("positions", Positions(shape.context, d, unused=shape.unused_positions, dropout=dropout)))
    if shape.embedding_norm:
        layers.append(("embedding_norm", _norm(shape)))
    layers.extend(_blocks(shape, dropout, context_method))
    layers.append(("norm", _norm(shape)))
    tied, scale = "embedding/table" if shape.tied else None, 1 / shape.logits_divisor
    layers.append(("head", Head(v, d, tied=tied, bias=shape.head_bias, scale=scale, cap=shape.logits_cap)))
    return Model(name, tuple(layers), "b s", "b s v", "b s", token_loss(v), shape.context, v)


def token_loss(vocabulary: int) -> Callable:
    """Cross-entropy of logits[b s v], which may be sharded over v."""
    return class_loss("v", vocabulary, check=False)


def _norm(shape: DecoderConfig) -> Layer:
    if shape.norm == "rms":
        return RMSNorm(shape.width, shape.epsilon)
    return LayerNorm(shape.width, shape.epsilon, scale=shape.norm != "layer-plain", shift=shape.norm == "layer")


def _blocks(shape: DecoderConfig, dropout: float, context_method: str) -> Iterator[tuple[str, Layer]]:
    """Yield the layers of all blocks."""
    d, out_std = shape.width, 0.02 / sqrt(2 * shape.layers)
    context = method_called(context_method)

    def residual(inner: Layer) -> Residual:
        before = _norm(shape) if shape.norm_position != "after" else None
        after = _norm(shape) if shape.norm_position != "before" else None
        return Residual(before, inner, dropout, after=after, scale=shape.residual_scale)

    for i in range(shape.layers):
        config = shape.attention_of(i)
        attention = Attention(d, shape.heads, shape.key_value_heads, config, context=context, out_std=out_std)
        if shape.parallel != "none":
            yield f"block{i}/parallel", _parallel_branches(shape, attention, _perceptron(shape, out_std), dropout)
            continue
        yield f"block{i}/attention", residual(attention)
        if shape.mixture is not None and shape.mixture.is_routed(i, shape.layers):
            yield f"block{i}/moe", residual(shape.mixture.layer(d, shape.hidden, out_std, gated=shape.gated))
        else:
            yield f"block{i}/mlp", residual(_perceptron(shape, out_std))


def _perceptron(shape: DecoderConfig, out_std: float) -> Layer:
    kind = GatedMLP if shape.gated else MLP
    return kind(shape.width, shape.hidden, activation=shape.activation, bias=shape.mlp_bias, out_std=out_std)


def _parallel_branches(shape: DecoderConfig, attention: Layer, mlp: Layer, dropout: float) -> Parallel:
    if shape.parallel == "one-norm":
        return Parallel(("attention", attention), ("mlp", mlp), norm=_norm(shape), dropout=dropout)
    branches = Branch(_norm(shape), attention), Branch(_norm(shape), mlp)
    return Parallel(("attention", branches[0]), ("mlp", branches[1]), dropout=dropout)


# --- GPT: pre-norm blocks with learned positions, layer norms and GELU, after GPT-2 (Radford et al., 2019)


@dataclass(frozen=True)
class GPTSize(Configuration):
    """The shape of a GPT."""

    layers: int = setting(MISSING, least=1)
    width: int = setting(MISSING, least=1)  #: d
    heads: int = setting(MISSING, least=1)  #: h
    context: int = setting(MISSING, least=1)  #: longest s
    vocabulary: int = setting(BYTES, least=1)  #: v
    hidden: int | None = setting(None, least=1)  #: f; None: 4 d
    tied: bool = True  #: whether the head uses the embedding's table
    #: heads of keys and values, each shared by equally many queries; None: all
    key_value_heads: int | None = setting(None, least=1)
    mixture: Mixture | None = None  #: experts instead of MLPs; None: all MLPs are dense
    epsilon: float = setting(1e-5, least=1e-30)  #: added to the variance in layer norms

    @property
    def config(self) -> DecoderConfig:
        """The DecoderConfig of this shape."""
        return DecoderConfig(**{"family": "gpt2", **vars(self), "hidden": self.hidden or 4 * self.width})


GPT_SIZES = {
    "gpt-nano": GPTSize(layers=8, width=96, heads=6, context=128),
    "gpt-mini": GPTSize(layers=6, width=384, heads=6, context=256),
    "gpt2": GPTSize(layers=12, width=768, heads=12, context=1024, vocabulary=50257),
    # the same work per token as the dense models of these names
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
    """Return ``decoder`` for a GPT. Raises UsageError for sizes that do not fit together."""
    try:
        config = size.config
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    return decoder(config, name, dropout, context_method)
