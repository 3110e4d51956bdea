"""Where each parameter of a decoder stands in a GGUF file, whose tensors are called alike in all architectures."""

from __future__ import annotations

from typing import Any

from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.hf.tensor_slice import Names, Stored
from spmd_engine.models.hf.weight_map import rows_of

#: Families whose rows of queries and keys the converter puts in another order: neighbours are turned.
PUT_IN_ORDER = (
    "llama", "mixtral", "mistral", "ministral3", "granite", "granitemoe", "minicpm", "smollm3", "olmo", "internlm2",
    "arcee",
)  # fmt: skip
_FUSED = ("phi3", "glm", "glm4")  # gate and up are one tensor
_NORM_AFTER_ATTENTION = ("seed-oss",)  # is what they call the norm before the perceptron
_NORMS_OF_FALCON = {"attn_norm": "attn_norm_2", "ffn_norm": "attn_norm"}  # if there are two
_GPT2 = {
    "learned": True, "norm": "layer", "bias": True, "output_bias": True, "perceptron_bias": True, "gated": False,
    "activation": "gelu",
}  # fmt: skip
_ATTENTION = {"query": "q", "key": "k", "value": "v"}
#: Of perceptrons: what they are called here, and in the file, dims, and what their biases are called here.
_GATED = (("gate", "ffn_gate", "f d", "gate_bias"), ("up", "ffn_up", "f d", "up_bias"))
_PLAIN = (("w0", "ffn_up", "f d", "b0"), ("w1", "ffn_down", "d f", "b1"))
_DOWN = ("down", "ffn_down", "d f", "down_bias")


def gguf_names(shape: DecoderConfig) -> Names:
    """All parameters of a decoder, in its order."""
    if shape.family == "gpt2":  # of which its shape does not speak
        shape = shape.changed(**_GPT2)
    yield "embedding/table", _at("token_embd", "v d")
    if shape.embedding_norm:
        yield from _norm(shape, "embedding_norm", "token_embd_norm")
    if shape.learned:
        yield "positions/table", _at("position_embd", "p d")
    for i in range(shape.layers):
        yield from _of_block(shape, f"block{i}" if shape.parallel == "none" else f"block{i}/parallel", f"blk.{i}.")
    yield from _norm(shape, "norm", "output_norm")
    if not shape.tied:
        yield "head/table", _at("output", "v d")
    if shape.head_bias:
        yield "head/bias", _at("output", "v", "bias")


def _of_block(shape: DecoderConfig, own: str, blk: str) -> Names:
    renamed = _NORMS_OF_FALCON if shape.family == "falcon" and shape.parallel == "two-norms" else {}
    if shape.family in _NORM_AFTER_ATTENTION:
        renamed = {"ffn_norm": "post_attention_norm"}

    def norm(name: str, tensor: str) -> Names:
        return _norm(shape, f"{own}/{name}", blk + renamed.get(tensor, tensor))

    if shape.parallel == "one-norm":
        yield from norm("norm", "attn_norm")
    elif shape.norms != "after":
        yield from norm("attention/norm", "attn_norm")
    yield from _of_attention(shape, f"{own}/attention", blk)
    if shape.norms != "before":
        yield from norm("attention/norm_after", "post_attention_norm")
    kind = "mlp" if shape.mixture is None else "moe"
    if shape.parallel != "one-norm" and shape.norms != "after":
        yield from norm(f"{kind}/norm", "ffn_norm")
    yield from _of_perceptron(shape, f"{own}/{kind}", blk)
    if shape.norms != "before":
        yield from norm(f"{kind}/norm_after", "post_ffw_norm")


def _of_attention(shape: DecoderConfig, own: str, blk: str) -> Names:
    """Queries, keys and values have a tensor each, or are one behind the other in one."""
    queries = "hr" if shape.heads > (shape.key_value_heads or shape.heads) else "h"
    for name, short in _ATTENTION.items():
        dims, rows = f"{queries if name == 'query' else 'h'}k", rows_of(shape, name)
        pairs = "neighbours" if shape.family in PUT_IN_ORDER and name != "value" else ""

        def at(dims: str, kind: str, short: str = short, rows: Any = rows, pairs: str = pairs) -> tuple[Stored, ...]:
            apart = _at(f"{blk}attn_{short}", dims, kind, pairs=pairs)
            return apart + _at(f"{blk}attn_qkv", dims, kind, pairs=pairs, rows=rows)

        yield f"{own}/{name}", at(f"{dims} d", "weight")
        if shape.bias:
            yield f"{own}/{name}_bias", at(dims, "bias")
    if shape.query_key_norm:
        of_query, of_key = (f"{queries}k", "hk") if shape.norm_together else ("k", "k")
        yield f"{own}/query_norm", _at(f"{blk}attn_q_norm", of_query)
        yield f"{own}/key_norm", _at(f"{blk}attn_k_norm", of_key)
    yield f"{own}/output", _at(f"{blk}attn_output", f"d {queries}k")
    if shape.output_bias:
        yield f"{own}/output_bias", _at(f"{blk}attn_output", "d", "bias")


def _of_perceptron(shape: DecoderConfig, own: str, blk: str) -> Names:
    if shape.mixture is not None:
        yield from _of_experts(shape, own, blk)
        return
    for name, tensor, dims, bias in (*_GATED, _DOWN) if shape.gated else _PLAIN:
        if shape.family in _FUSED and name != "down":
            yield f"{own}/{name}", _at(f"{blk}ffn_up", "nf d", at={"n": (int(name == "up"), 2)})
            continue
        yield f"{own}/{name}", _at(blk + tensor, dims)
        if shape.perceptron_bias:
            yield f"{own}/{bias}", _at(blk + tensor, dims[0], "bias")


def _of_experts(shape: DecoderConfig, own: str, blk: str) -> Names:
    """All of a block in one tensor; those that every token goes through in another, side by side."""
    experts, shared = shape.mixture.experts, shape.mixture.shared
    yield f"{own}/router", _at(f"{blk}ffn_gate_inp", "E d")
    for name, tensor, dims, _ in (*_GATED, _DOWN):
        for e in range(experts):
            yield f"{own}/expert{e}/{name}", _at(f"{blk}{tensor}_exps", f"e {dims}", at={"e": (e, experts)})
        for number in range(shared):
            of_all = dims.replace("f", "nf")
            yield f"{own}/shared{number}/{name}", _at(f"{blk}{tensor}_shexp", of_all, at={"n": (number, shared)})
    if shape.mixture.shared_gate:
        yield f"{own}/shared_gate", _at(f"{blk}ffn_gate_inp_shexp", "d")


def _norm(shape: DecoderConfig, own: str, tensor: str) -> Names:
    if shape.norm != "layer-plain":
        yield f"{own}/scale", _at(tensor, "d")
    if shape.norm == "layer":
        yield f"{own}/shift", _at(tensor, "d", "bias")


def _at(tensor: str, dims: str, kind: str = "weight", **options: Any) -> tuple[Stored, ...]:
    return (Stored(f"{tensor}.{kind}", dims, **options),)
