"""Where each parameter of a decoder stands in files of Hugging Face's format: names and dims, as data.

A tensor's dims are written as words of the parameter's letters: a query's weights d h r k are stored as ``"hrk d"``,
two dims, of which the first runs over h, r and k. A letter that the parameter has not stands for several parameters
in one tensor, and ``at`` says which of them this is: of GPT-2's ``"d nhk"`` the query is n = 0 of 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spmd_engine.models.decoder import DecoderShape


@dataclass(frozen=True)
class Stored:
    """A parameter in a tensor."""

    tensor: str
    dims: str
    at: Mapping[str, tuple[int, int]] = field(default_factory=dict)  #: letter -> number of this parameter, of how many
    #: How rotary positions pair the numbers of k in the file, if otherwise than here: see ``RotaryOptions.pairs``.
    pairs: str = ""
    rows: tuple[int, int, int] | None = None  #: these of its rows: first, end, of how many; None: all
    less: float = 0.0  #: what is stored is so much less


#: A parameter's full name, and the ways in which it may be stored, the first of which is how it is written.
Names = Iterator[tuple[str, tuple[Stored, ...]]]

#: Endings of the names of what is no parameter, but may be stored.
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_ATTENTION = {"query": "q", "key": "k", "value": "v"}


def stored_names(shape: DecoderShape) -> Names:
    """All parameters of a decoder, in its order."""
    return _of_gpt2(shape) if shape.family == "gpt2" else _of_llama(shape)


def _of_gpt2(shape: DecoderShape) -> Names:
    def at(name: str, dims: str, number: int | None = None) -> tuple[Stored, ...]:
        place = {} if number is None else {"n": (number, 3)}
        return Stored(f"transformer.{name}", dims, place), Stored(name, dims, place)

    yield "embedding/table", at("wte.weight", "v d")
    yield "positions/table", at("wpe.weight", "p d")
    for i in range(shape.layers):
        yield f"block{i}/attention/norm/scale", at(f"h.{i}.ln_1.weight", "d")
        yield f"block{i}/attention/norm/shift", at(f"h.{i}.ln_1.bias", "d")
        for number, name in enumerate(_ATTENTION):
            yield f"block{i}/attention/{name}", at(f"h.{i}.attn.c_attn.weight", "d nhk", number)
        for number, name in enumerate(_ATTENTION):
            yield f"block{i}/attention/{name}_bias", at(f"h.{i}.attn.c_attn.bias", "nhk", number)
        yield f"block{i}/attention/output", at(f"h.{i}.attn.c_proj.weight", "hk d")
        yield f"block{i}/attention/output_bias", at(f"h.{i}.attn.c_proj.bias", "d")
        yield f"block{i}/mlp/norm/scale", at(f"h.{i}.ln_2.weight", "d")
        yield f"block{i}/mlp/norm/shift", at(f"h.{i}.ln_2.bias", "d")
        yield f"block{i}/mlp/w0", at(f"h.{i}.mlp.c_fc.weight", "d f")
        yield f"block{i}/mlp/b0", at(f"h.{i}.mlp.c_fc.bias", "f")
        yield f"block{i}/mlp/w1", at(f"h.{i}.mlp.c_proj.weight", "f d")
        yield f"block{i}/mlp/b1", at(f"h.{i}.mlp.c_proj.bias", "d")
    yield "norm/scale", at("ln_f.weight", "d")
    yield "norm/shift", at("ln_f.bias", "d")
    if not shape.tied:
        yield "head/table", (Stored("lm_head.weight", "v d"),)


def _of_llama(shape: DecoderShape) -> Names:
    queries = "hr" if shape.heads > (shape.key_value_heads or shape.heads) else "h"
    neighbours, fused = shape.rotary.pairs == "neighbours", shape.family == "phi3"
    less = 1.0 if shape.family.startswith("gemma") else 0.0  # of scales
    inner, after_attention, after_mlp = "post_attention_layernorm", "", ""
    if shape.norms == "both":
        inner, after_attention, after_mlp = "pre_feedforward_layernorm", inner, "post_feedforward_layernorm"

    def at(name: str, dims: str, turned: bool = False, **options: Any) -> tuple[Stored, ...]:
        pairs = "halves" if turned else ""
        return Stored(f"model.{name}", dims, pairs=pairs, **options), Stored(name, dims, pairs=pairs, **options)

    yield "embedding/table", at("embed_tokens.weight", "v d")
    for i in range(shape.layers):
        block, attention = f"block{i}/attention", f"layers.{i}.self_attn"
        yield f"{block}/norm/scale", at(f"layers.{i}.input_layernorm.weight", "d", less=less)
        for name, short in _ATTENTION.items():
            heads, turned = queries if name == "query" else "h", neighbours and name != "value"
            if fused:
                yield f"{block}/{name}", at(f"{attention}.qkv_proj.weight", f"{heads}k d", rows=_rows(shape, name))
                continue
            yield f"{block}/{name}", at(f"{attention}.{short}_proj.weight", f"{heads}k d", turned)
            if shape.bias:
                yield f"{block}/{name}_bias", at(f"{attention}.{short}_proj.bias", f"{heads}k", turned)
        if shape.query_key_norm:
            yield f"{block}/query_norm", at(f"{attention}.q_norm.weight", "k", neighbours, less=less)
            yield f"{block}/key_norm", at(f"{attention}.k_norm.weight", "k", neighbours, less=less)
        yield f"{block}/output", at(f"{attention}.o_proj.weight", f"d {queries}k")
        if shape.output_bias:
            yield f"{block}/output_bias", at(f"{attention}.o_proj.bias", "d")
        if after_attention:
            yield f"{block}/norm_after/scale", at(f"layers.{i}.{after_attention}.weight", "d", less=less)
        routed = shape.mixture is not None and shape.mixture.is_routed(i, shape.layers)
        kind = "moe" if routed else "mlp"
        yield f"block{i}/{kind}/norm/scale", at(f"layers.{i}.{inner}.weight", "d", less=less)
        if routed:
            yield from _of_experts(shape, i)
            continue
        for number, name in enumerate(("gate", "up")):
            if fused:
                yield f"block{i}/mlp/{name}", at(f"layers.{i}.mlp.gate_up_proj.weight", "nf d", at={"n": (number, 2)})
            else:
                yield f"block{i}/mlp/{name}", at(f"layers.{i}.mlp.{name}_proj.weight", "f d")
        yield f"block{i}/mlp/down", at(f"layers.{i}.mlp.down_proj.weight", "d f")
        if after_mlp:
            yield f"block{i}/{kind}/norm_after/scale", at(f"layers.{i}.{after_mlp}.weight", "d", less=less)
    yield "norm/scale", at("norm.weight", "d", less=less)
    if not shape.tied:
        yield "head/table", (Stored("lm_head.weight", "v d"),)


def _rows(shape: DecoderShape, name: str) -> tuple[int, int, int]:
    """Of queries, keys or values in the tensor of all three, one behind the other."""
    width, shared = shape.head_width or shape.width // shape.heads, shape.key_value_heads or shape.heads
    ends = (0, shape.heads * width, (shape.heads + shared) * width, (shape.heads + 2 * shared) * width)
    number = list(_ATTENTION).index(name)
    return ends[number], ends[number + 1], ends[-1]


def _of_experts(shape: DecoderShape, i: int) -> Names:
    """One tensor an expert, or, as newer programs write them, all of a layer in one, gate and up side by side."""
    mixtral, experts = shape.family == "mixtral", shape.mixture.experts
    own, called = f"block{i}/moe", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    folder = f"model.layers.{i}.mlp"
    each = folder
    if mixtral:
        each, called = f"model.layers.{i}.block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}
    router = dict.fromkeys((f"{each}.gate.weight", f"{folder}.gate.weight"))
    yield f"{own}/router", tuple(Stored(name, "E d") for name in router)
    for e in range(experts):
        for number, name in enumerate(("gate", "up")):
            together = Stored(f"{folder}.experts.gate_up_proj", "e nf d", {"e": (e, experts), "n": (number, 2)})
            yield f"{own}/expert{e}/{name}", (Stored(f"{each}.experts.{e}.{called[name]}.weight", "f d"), together)
        together = Stored(f"{folder}.experts.down_proj", "e d f", {"e": (e, experts)})
        yield f"{own}/expert{e}/down", (Stored(f"{each}.experts.{e}.{called['down']}.weight", "d f"), together)
