"""Where each parameter of a decoder stands in files of Hugging Face's format: names and dims, as data."""

from __future__ import annotations

from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.hf.tables import BY_TABLE
from spmd_engine.models.hf.tensor_slice import Names, Stored
from spmd_engine.models.hf.weight_map import names_by_table, rows_of

#: Endings of the names of what is no parameter, but may be stored.
IGNORED = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
#: Names of the head's table: where it is tied, a copy may be stored.
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_ATTENTION = {"query": "q", "key": "k", "value": "v"}


def stored_names(shape: DecoderConfig) -> Names:
    """All parameters of a decoder, in its order."""
    if shape.family in BY_TABLE:
        return names_by_table(shape)
    return _of_gpt2(shape) if shape.family == "gpt2" else _of_llama(shape)


def _of_gpt2(shape: DecoderConfig) -> Names:
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


def _of_llama(shape: DecoderConfig) -> Names:
    queries = "hr" if shape.heads > (shape.key_value_heads or shape.heads) else "h"
    neighbours, fused = shape.rotary.pairs == "neighbours", shape.family == "phi3"
    if neighbours and shape.rotary.part != 1:
        raise UsageError(f"heads of a {shape.family} that are turned in part have pairs that are halves")
    less = 1.0 if shape.family.startswith("gemma") else 0.0  # of scales
    before_mlp, after_attention, after_mlp = "post_attention_layernorm", "", ""
    if shape.norms != "before":
        before_mlp, after_attention, after_mlp = "pre_feedforward_layernorm", before_mlp, "post_feedforward_layernorm"

    def at(name: str, dims: str, turned: bool = False, **options: Any) -> tuple[Stored, ...]:
        pairs = "halves" if turned else ""
        return Stored(f"model.{name}", dims, pairs=pairs, **options), Stored(name, dims, pairs=pairs, **options)

    yield "embedding/table", at("embed_tokens.weight", "v d")
    for i in range(shape.layers):
        block, attention = f"block{i}/attention", f"layers.{i}.self_attn"
        if shape.norms != "after":
            yield f"{block}/norm/scale", at(f"layers.{i}.input_layernorm.weight", "d", less=less)
        for name, short in _ATTENTION.items():
            heads, turned = queries if name == "query" else "h", neighbours and name != "value"
            if fused:
                yield f"{block}/{name}", at(f"{attention}.qkv_proj.weight", f"{heads}k d", rows=rows_of(shape, name))
                continue
            yield f"{block}/{name}", at(f"{attention}.{short}_proj.weight", f"{heads}k d", turned)
            if shape.bias:
                yield f"{block}/{name}_bias", at(f"{attention}.{short}_proj.bias", f"{heads}k", turned)
        if shape.query_key_norm:
            of_query, of_key = (f"{queries}k", "hk") if shape.norm_together else ("k", "k")
            yield f"{block}/query_norm", at(f"{attention}.q_norm.weight", of_query, neighbours, less=less)
            yield f"{block}/key_norm", at(f"{attention}.k_norm.weight", of_key, neighbours, less=less)
        yield f"{block}/output", at(f"{attention}.o_proj.weight", f"d {queries}k")
        if shape.output_bias:
            yield f"{block}/output_bias", at(f"{attention}.o_proj.bias", "d")
        if after_attention:
            yield f"{block}/norm_after/scale", at(f"layers.{i}.{after_attention}.weight", "d", less=less)
        routed = shape.mixture is not None and shape.mixture.is_routed(i, shape.layers)
        kind = "moe" if routed else "mlp"
        if shape.norms != "after":
            yield f"block{i}/{kind}/norm/scale", at(f"layers.{i}.{before_mlp}.weight", "d", less=less)
        if routed:
            yield from _of_experts(shape, i)
            continue
        for number, name in enumerate(("gate", "up")):
            if fused:
                yield f"block{i}/mlp/{name}", at(f"layers.{i}.mlp.gate_up_proj.weight", "nf d", at={"n": (number, 2)})
            else:
                yield f"block{i}/mlp/{name}", at(f"layers.{i}.mlp.{name}_proj.weight", "f d")
        yield f"block{i}/mlp/down", at(f"layers.{i}.mlp.down_proj.weight", "d f")
        if shape.perceptron_bias:
            for name, dims in (("gate", "f"), ("up", "f"), ("down", "d")):
                yield f"block{i}/mlp/{name}_bias", at(f"layers.{i}.mlp.{name}_proj.bias", dims)
        if after_mlp:
            yield f"block{i}/{kind}/norm_after/scale", at(f"layers.{i}.{after_mlp}.weight", "d", less=less)
    yield "norm/scale", at("norm.weight", "d", less=less)
    if not shape.tied:
        yield "head/table", (Stored("lm_head.weight", "v d"),)


def _of_experts(shape: DecoderConfig, i: int) -> Names:
    """One tensor an expert, or, as newer programs write them, all of a layer in one, gate and up side by side."""
    mixtral, experts = shape.family == "mixtral", shape.mixture.experts
    if shape.family == "granitemoe":
        yield from _of_granite_experts(shape, i)
        return
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
    for number in range(shape.mixture.shared):
        at, module = {"n": (number, shape.mixture.shared)}, f"{folder}.shared_expert"
        for name in ("gate", "up"):
            yield f"{own}/shared{number}/{name}", (Stored(f"{module}.{name}_proj.weight", "nf d", at),)
        yield f"{own}/shared{number}/down", (Stored(f"{module}.down_proj.weight", "d nf", at),)
    if shape.mixture.shared_gate:
        yield f"{own}/shared_gate", (Stored(f"{folder}.shared_expert_gate.weight", "n d", {"n": (0, 1)}),)


def _of_granite_experts(shape: DecoderConfig, i: int) -> Names:
    own, module, experts = f"block{i}/moe", f"model.layers.{i}.block_sparse_moe", shape.mixture.experts
    yield f"{own}/router", tuple(Stored(f"{module}.{name}.weight", "E d") for name in ("router.layer", "router"))
    for e in range(experts):
        for number, name in enumerate(("gate", "up")):
            at = {"e": (e, experts), "n": (number, 2)}
            called = "input_linear.weight", "experts.gate_up_proj"
            yield f"{own}/expert{e}/{name}", tuple(Stored(f"{module}.{each}", "e nf d", at) for each in called)
        called = "output_linear.weight", "experts.down_proj"
        yield (
            f"{own}/expert{e}/down",
            tuple(Stored(f"{module}.{each}", "e d f", {"e": (e, experts)}) for each in called),
        )
