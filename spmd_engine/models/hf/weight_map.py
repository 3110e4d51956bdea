"""Where decoders of many families have their parameters in files of Hugging Face's format: modules' names, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.hf.tensor_slice import Names, Stored

_ATTENTION = {name: f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")}
_OF_LLAMA = _ATTENTION | {
    "": "model.", "embedding": "embed_tokens", "norm": "norm", "block": "layers.", "norm_of_block": "input_layernorm",
    "output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_TWO_NORMS = _OF_LLAMA | {"attention/norm": "input_layernorm", "mlp/norm": "post_attention_layernorm"}
_WITHOUT_GATE = _TWO_NORMS | {"w0": "mlp.up_proj", "w1": "mlp.down_proj"}
_GLM = _TWO_NORMS | {"gate_up": "mlp.gate_up_proj"}
#: Of each family: what all names begin with, which may be missing, modules outside of blocks, what a block is called,
#: and the modules in it. Where queries, keys and values are in ``all`` of one module, each head has its three side by
#: side; where they are ``grouped``, each key head has its queries, its key and its value; ``stacked``, all queries come
#: before all keys, and these before all values.
_MODULES: Mapping[str, Mapping[str, str]] = {
    "gpt-neo": {
        "": "transformer.", "embedding": "wte", "positions": "wpe", "norm": "ln_f", "block": "h.",
        "attention/norm": "ln_1", "query": "attn.attention.q_proj", "key": "attn.attention.k_proj",
        "value": "attn.attention.v_proj", "output": "attn.attention.out_proj", "mlp/norm": "ln_2",
        "w0": "mlp.c_fc", "w1": "mlp.c_proj",
    },
    "gpt-neox": {
        "": "gpt_neox.", "embedding": "embed_in", "norm": "final_layer_norm", "head": "embed_out", "block": "layers.",
        "attention/norm": "input_layernorm", "all": "attention.query_key_value", "output": "attention.dense",
        "mlp/norm": "post_attention_layernorm", "w0": "mlp.dense_h_to_4h", "w1": "mlp.dense_4h_to_h",
    },
    "opt": _ATTENTION | {
        "": "model.", "embedding": "decoder.embed_tokens", "positions": "decoder.embed_positions",
        "norm": "decoder.final_layer_norm", "block": "decoder.layers.", "attention/norm": "self_attn_layer_norm",
        "output": "self_attn.out_proj", "mlp/norm": "final_layer_norm", "w0": "fc1", "w1": "fc2",
    },
    "phi": _ATTENTION | {
        "": "model.", "embedding": "embed_tokens", "norm": "final_layernorm", "block": "layers.",
        "norm_of_block": "input_layernorm", "output": "self_attn.dense", "w0": "mlp.fc1", "w1": "mlp.fc2",
    },
    "stablelm": _ATTENTION | {
        "": "model.", "embedding": "embed_tokens", "norm": "norm", "block": "layers.",
        "norm_of_block": "input_layernorm", "attention/norm": "input_layernorm", "output": "self_attn.o_proj",
        "mlp/norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    },
    "starcoder2": _ATTENTION | {
        "": "model.", "embedding": "embed_tokens", "norm": "norm", "block": "layers.",
        "attention/norm": "input_layernorm", "output": "self_attn.o_proj", "mlp/norm": "post_attention_layernorm",
        "w0": "mlp.c_fc", "w1": "mlp.c_proj",
    },
    "olmo": _OF_LLAMA | {"mlp/norm": "", "attention/norm": ""},
    "cohere": _OF_LLAMA,
    "cohere2": _OF_LLAMA,
    "gptj": {
        "": "transformer.", "embedding": "wte", "norm": "ln_f", "block": "h.", "norm_of_block": "ln_1",
        "query": "attn.q_proj", "key": "attn.k_proj", "value": "attn.v_proj", "output": "attn.out_proj",
        "w0": "mlp.fc_in", "w1": "mlp.fc_out",
    },
    "falcon": {
        "": "transformer.", "embedding": "word_embeddings", "norm": "ln_f", "block": "h.",
        "norm_of_block": "input_layernorm", "attention/norm": "ln_attn", "mlp/norm": "ln_mlp",
        "grouped": "self_attention.query_key_value", "output": "self_attention.dense", "w0": "mlp.dense_h_to_4h",
        "w1": "mlp.dense_4h_to_h",
    },
    "internlm2": {
        "": "model.", "embedding": "tok_embeddings", "norm": "norm", "head": "output", "block": "layers.",
        "attention/norm": "attention_norm", "grouped": "attention.wqkv", "output": "attention.wo",
        "mlp/norm": "ffn_norm", "gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2",
    },
    "bloom": {
        "": "transformer.", "embedding": "word_embeddings", "embedding_norm": "word_embeddings_layernorm",
        "norm": "ln_f", "block": "h.", "attention/norm": "input_layernorm", "all": "self_attention.query_key_value",
        "output": "self_attention.dense", "mlp/norm": "post_attention_layernorm", "w0": "mlp.dense_h_to_4h",
        "w1": "mlp.dense_4h_to_h",
    },
    "mpt": {
        "": "transformer.", "embedding": "wte", "norm": "norm_f", "block": "blocks.", "attention/norm": "norm_1",
        "stacked": "attn.Wqkv", "output": "attn.out_proj", "mlp/norm": "norm_2", "w0": "ffn.up_proj",
        "w1": "ffn.down_proj",
    },
    "exaone": {
        "": "transformer.", "embedding": "wte", "norm": "ln_f", "block": "h.", "attention/norm": "ln_1",
        "query": "attn.attention.q_proj", "key": "attn.attention.k_proj", "value": "attn.attention.v_proj",
        "output": "attn.attention.out_proj", "mlp/norm": "ln_2", "gate": "mlp.c_fc_0", "up": "mlp.c_fc_1",
        "down": "mlp.c_proj",
    },
    "gpt-bigcode": {
        "": "transformer.", "embedding": "wte", "positions": "wpe", "norm": "ln_f", "block": "h.",
        "attention/norm": "ln_1", "grouped": "attn.c_attn", "output": "attn.c_proj", "mlp/norm": "ln_2",
        "w0": "mlp.c_fc", "w1": "mlp.c_proj",
    },
    "arcee": _WITHOUT_GATE,
    "nemotron": _WITHOUT_GATE,
    "jais2": _WITHOUT_GATE,
    "seed-oss": _TWO_NORMS,
    "ernie4-5": _TWO_NORMS,
    "helium": _TWO_NORMS,
    "cwm": _TWO_NORMS,
    "ministral": _TWO_NORMS,
    "ministral3": _TWO_NORMS,
    "granitemoehybrid": _TWO_NORMS | {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"},
    "internlm3": _TWO_NORMS,
    "hunyuan-v1-dense": _TWO_NORMS | {
        "query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm",
    },
    "exaone4": _OF_LLAMA | {
        "query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm",
        "attention/norm_after": "post_attention_layernorm", "mlp/norm_after": "post_feedforward_layernorm",
    },
    "glm": _GLM,
    "glm4": _GLM | {
        "attention/norm_after": "post_self_attn_layernorm", "mlp/norm_after": "post_mlp_layernorm",
    },
}  # fmt: skip
_LESS = {"nemotron": 1.0}  # of scales: so much less is stored
#: Of perceptrons: dims as stored, and of their biases what they are called here.
_DIMS = {"w0": "f d", "w1": "d f", "gate": "f d", "up": "f d", "down": "d f"}
_BIASES = {"w0": "b0", "w1": "b1", "gate": "gate_bias", "up": "up_bias", "down": "down_bias"}


def names_by_table(shape: DecoderConfig) -> Names:
    """All parameters of a decoder of these families, in its order."""
    modules = _MODULES[shape.family]

    def at(module: str, dims: str, kind: str = "weight", **options: Any) -> tuple[Stored, ...]:
        tensor = f"{module}.{kind}"
        return Stored(modules[""] + tensor, dims, **options), Stored(tensor, dims, **options)

    def norm(own: str, module: str) -> Names:
        if shape.norm != "layer-plain":
            yield f"{own}/scale", at(module, "d", less=_LESS.get(shape.family, 0.0))
        if shape.norm == "layer":
            yield f"{own}/shift", at(module, "d", "bias")

    yield "embedding/table", at(modules["embedding"], "v d")
    if shape.embedding_norm:
        yield from norm("embedding_norm", modules["embedding_norm"])
    if shape.learned:
        yield "positions/table", at(modules["positions"], "p d")
    for i in range(shape.layers):
        block, own = f"{modules['block']}{i}.", f"block{i}" if shape.parallel == "none" else f"block{i}/parallel"
        if shape.parallel == "one-norm":
            yield from norm(f"{own}/norm", block + modules["norm_of_block"])
        elif shape.norms != "after":
            yield from norm(f"{own}/attention/norm", block + modules["attention/norm"])
        for name, dims, module, options in _projections(shape, modules):
            yield f"{own}/attention/{name}", at(block + module, dims, **options)
            if shape.output_bias if name == "output" else shape.bias:
                yield f"{own}/attention/{name}_bias", at(block + module, dims.split()[0], "bias", **options)
        for name in ("query_norm", "key_norm") if shape.query_key_norm else ():
            yield f"{own}/attention/{name}", at(block + modules[name], "k")
        if shape.norms != "before":
            yield from norm(f"{own}/attention/norm_after", block + modules["attention/norm_after"])
        if shape.parallel != "one-norm" and shape.norms != "after":
            yield from norm(f"{own}/mlp/norm", block + modules["mlp/norm"])
        for name in ("gate", "up", "down") if shape.gated else ("w0", "w1"):
            if "gate_up" in modules and name != "down":
                place = {"n": (int(name == "up"), 2)}
                yield f"{own}/mlp/{name}", at(block + modules["gate_up"], "nf d", at=place)
                continue
            yield f"{own}/mlp/{name}", at(block + modules[name], _DIMS[name])
            if shape.perceptron_bias:
                yield f"{own}/mlp/{_BIASES[name]}", at(block + modules[name], _DIMS[name][0], "bias")
        if shape.norms != "before":
            yield from norm(f"{own}/mlp/norm_after", block + modules["mlp/norm_after"])
    yield from norm("norm", modules["norm"])
    if not shape.tied:
        heads = dict.fromkeys((modules.get("head", "lm_head"), "lm_head"))
        yield "head/table", tuple(Stored(f"{head}.weight", "v d") for head in heads)
    if shape.head_bias:
        yield "head/bias", (Stored("lm_head.bias", "v"),)


def _projections(shape: DecoderConfig, modules: Mapping[str, str]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Of the attention's: name, dims, module, and which part of its tensor it is."""
    queries = "hr" if shape.heads > (shape.key_value_heads or shape.heads) else "h"
    for number, name in enumerate(("query", "key", "value")):
        if "grouped" in modules:
            shared = shape.heads // (shape.key_value_heads or shape.heads)
            if name == "query" and shared > 1:
                yield name, "hrk d", modules["grouped"], {"among": {"r": (0, shared + 2)}}
            else:
                yield name, "hnk d", modules["grouped"], {"at": {"n": (shared + number - 1, shared + 2)}}
        elif "all" in modules:
            yield name, "hnk d", modules["all"], {"at": {"n": (number, 3)}}
        elif "stacked" in modules:
            yield name, "nhk d", modules["stacked"], {"at": {"n": (number, 3)}}
        else:
            yield name, f"{queries if name == 'query' else 'h'}k d", modules[name], {}
    yield "output", f"d {queries}k", modules["output"], {}


def rows_of(shape: DecoderConfig, name: str) -> tuple[int, int, int]:
    """Of queries, keys or values in a tensor of all three, one behind the other: first, end, and of how many."""
    width, shared = shape.head_width or shape.width // shape.heads, shape.key_value_heads or shape.heads
    ends = (0, shape.heads * width, (shape.heads + shared) * width, (shape.heads + 2 * shared) * width)
    number = ("query", "key", "value").index(name)
    return ends[number], ends[number + 1], ends[-1]
