"""What a GGUF file says of a decoder: its shape, and where each parameter stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.formats.gguf import GGUF
from spmd_engine.formats.tensor import FileTensor
from spmd_engine.layers.rotary import RotaryOptions
from spmd_engine.layers.router_options import RouterOptions
from spmd_engine.models.decoder import DecoderShape
from spmd_engine.models.mixture import Mixture
from spmd_engine.models.stored import Names, Stored

_FAMILIES = {"gpt2": "gpt2", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3-moe"}
IGNORED = ("rope_freqs.weight",)  #: says what the shape's rotary options say
#: Values of others by which nothing changes: routers take a softmax whose chosen weights sum to 1.
_WITHOUT_EFFECT = (
    ("expert_weights_norm", True), ("expert_weights_scale", 1.0), ("expert_gating_func", 1), ("logit_scale", 1.0),
    ("residual_scale", 1.0), ("embedding_scale", 1.0), ("rope.scale_linear", 1.0), ("rope.scaling.attn_factor", 1.0),
)  # fmt: skip
_LEARNT = 8192  # positions before Llama 3.1 was scaled: what ``rope_freqs`` is made of, with a factor
#: What may be said of a decoder: what is looked at here, and what changes nothing, or not up to the context.
_KNOWN = frozenset((
    "block_count", "context_length", "embedding_length", "feed_forward_length", "expert_feed_forward_length",
    "expert_count", "expert_used_count", "vocab_size", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon", "attention.causal", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "tensor_data_layout",
))  # fmt: skip


def shape_of_gguf(file: GGUF, where: str) -> DecoderShape:
    """The decoder that a file describes; raises CheckpointError for an architecture or feature not known here."""
    kind = file.facts.get("general.architecture")
    if kind not in _FAMILIES:
        raise CheckpointError(f"{where}: architecture {kind!r} is not known here; known are {', '.join(_FAMILIES)}")
    if not file.tensors:
        raise CheckpointError(f"{where} has no weights, at most a vocabulary; fetch the model's own file")
    facts = {name.removeprefix(f"{kind}."): value for name, value in file.facts.items() if name.startswith(f"{kind}.")}
    try:
        shape = _shape(_FAMILIES[kind], facts, file.tensors, where)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{where}: nothing says {error}") from error
    except (UsageError, TypeError, ValueError, ArithmeticError, IndexError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    for name, value in facts.items():
        if value and name not in _KNOWN and (name, value) not in _WITHOUT_EFFECT:
            raise CheckpointError(f"{where}: {kind}.{name} is {value!r}, a feature that is not known here")
    return shape


def _shape(family: str, facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], where: str) -> DecoderShape:
    heads, width = facts["attention.head_count"], facts["embedding_length"]
    if family == "gpt2":
        return DecoderShape(
            family=family,
            layers=facts["block_count"],
            width=width,
            heads=heads,
            head_width=width // heads,
            hidden=facts["feed_forward_length"],
            vocabulary=tensors["token_embd.weight"].shape[0],
            context=facts["context_length"],
            epsilon=_as_written(facts["attention.layer_norm_epsilon"]),
            tied="output.weight" not in tensors,
        )
    experts = facts.get("expert_count", 0)
    mixture = None
    if experts:
        family = "mixtral" if family == "llama" else family
        hidden = facts.get("expert_feed_forward_length") or facts["feed_forward_length"]
        mixture = Mixture(experts=experts, hidden=hidden, router=RouterOptions(top_k=facts["expert_used_count"]))
    head_width = facts.get("attention.key_length") or width // heads
    if facts.get("attention.value_length", head_width) != head_width:
        raise CheckpointError(f"{where}: heads of values are {facts['attention.value_length']} wide, keys {head_width}")
    if facts.get("rope.dimension_count", head_width) != head_width:
        raise CheckpointError(f"{where}: rope.dimension_count {facts['rope.dimension_count']} is not the head's width")
    return DecoderShape(
        family=family,
        layers=facts["block_count"],
        width=width,
        heads=heads,
        key_value_heads=facts.get("attention.head_count_kv", heads),
        head_width=head_width,
        hidden=facts["feed_forward_length"],
        vocabulary=tensors["token_embd.weight"].shape[0],
        context=facts["context_length"],
        epsilon=_as_written(facts["attention.layer_norm_rms_epsilon"]),
        tied="output.weight" not in tensors,
        rotary=_rotary(facts, tensors, head_width // 2, where),
        bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        query_key_norm=family.startswith("qwen3"),
        mixture=mixture,
    )


def _as_written(value: float) -> float:
    """1e-5, of which a file keeps 32 bits."""
    return float(f"{value:.7g}")


def _rotary(facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], pairs: int, where: str) -> RotaryOptions:
    plain = RotaryOptions(_as_written(facts.get("rope.freq_base", 10_000.0)))
    kind = facts.get("rope.scaling.type", "none")
    if kind == "linear":
        return plain.changed(scaling="linear", factor=float(facts["rope.scaling.factor"]))
    if kind != "none":
        raise CheckpointError(f"{where}: rope.scaling.type {kind!r} is not known here; known are none and linear")
    if "rope_freqs.weight" not in tensors:
        return plain
    divided = tensors["rope_freqs.weight"].read([[pairs]], [slice(None)]).tolist()
    found = plain.changed(scaling="llama3", factor=float(round(max(divided), 3)), original_context=_LEARNT)
    expected = [old / new for old, new in zip(plain.frequencies(pairs), found.frequencies(pairs), strict=True)]
    if any(abs(one - other) > 1e-4 * other for one, other in zip(divided, expected, strict=True)):
        raise CheckpointError(f"{where}: rope_freqs.weight is not that of Llama 3.1, and others are not known here")
    return found


def gguf_names(shape: DecoderShape) -> Names:
    """All parameters of a decoder, in its order. Of a llama, queries and keys pair neighbours in the file."""
    if shape.family == "gpt2":
        yield from _of_gpt2(shape)
        return
    pairs = "neighbours" if shape.family in ("llama", "mixtral") else ""
    queries = "hr" if shape.heads > (shape.key_value_heads or shape.heads) else "h"

    def at(tensor: str, dims: str, **options: Any) -> tuple[Stored, ...]:
        return (Stored(tensor, dims, **options),)

    yield "embedding/table", at("token_embd.weight", "v d")
    for i in range(shape.layers):
        block = f"block{i}/attention"
        yield f"{block}/norm/scale", at(f"blk.{i}.attn_norm.weight", "d")
        for name, short in (("query", "q"), ("key", "k"), ("value", "v")):
            heads, order = queries if name == "query" else "h", "" if name == "value" else pairs
            yield f"{block}/{name}", at(f"blk.{i}.attn_{short}.weight", f"{heads}k d", pairs=order)
            if shape.bias:
                yield f"{block}/{name}_bias", at(f"blk.{i}.attn_{short}.bias", f"{heads}k", pairs=order)
        if shape.query_key_norm:
            yield f"{block}/query_norm", at(f"blk.{i}.attn_q_norm.weight", "k")
            yield f"{block}/key_norm", at(f"blk.{i}.attn_k_norm.weight", "k")
        yield f"{block}/output", at(f"blk.{i}.attn_output.weight", f"d {queries}k")
        if shape.output_bias:
            yield f"{block}/output_bias", at(f"blk.{i}.attn_output.bias", "d")
        kind = "mlp" if shape.mixture is None else "moe"
        yield f"block{i}/{kind}/norm/scale", at(f"blk.{i}.ffn_norm.weight", "d")
        yield from _perceptrons(shape, i)
    yield "norm/scale", at("output_norm.weight", "d")
    if not shape.tied:
        yield "head/table", at("output.weight", "v d")


def _of_gpt2(shape: DecoderShape) -> Names:
    """Weights have their outputs first, as those of the others, and not as in Hugging Face's files of GPT-2."""

    def both(name: str, own: tuple[str, str], tensor: str, dims: str) -> Names:
        yield f"{name}/{own[0]}", (Stored(f"{tensor}.weight", dims),)
        yield f"{name}/{own[1]}", (Stored(f"{tensor}.bias", dims.split()[0]),)

    yield "embedding/table", (Stored("token_embd.weight", "v d"),)
    yield "positions/table", (Stored("position_embd.weight", "p d"),)
    for i in range(shape.layers):
        attention, mlp = f"block{i}/attention", f"block{i}/mlp"
        yield from both(f"{attention}/norm", ("scale", "shift"), f"blk.{i}.attn_norm", "d")
        for number, name in enumerate(("query", "key", "value")):
            at = {"n": (number, 3)}
            yield f"{attention}/{name}", (Stored(f"blk.{i}.attn_qkv.weight", "nhk d", at),)
            yield f"{attention}/{name}_bias", (Stored(f"blk.{i}.attn_qkv.bias", "nhk", at),)
        yield from both(attention, ("output", "output_bias"), f"blk.{i}.attn_output", "d hk")
        yield from both(f"{mlp}/norm", ("scale", "shift"), f"blk.{i}.ffn_norm", "d")
        yield from both(mlp, ("w0", "b0"), f"blk.{i}.ffn_up", "f d")
        yield from both(mlp, ("w1", "b1"), f"blk.{i}.ffn_down", "d f")
    yield from both("norm", ("scale", "shift"), "output_norm", "d")
    if not shape.tied:
        yield "head/table", (Stored("output.weight", "v d"),)


def _perceptrons(shape: DecoderShape, i: int) -> Names:
    dims: Sequence[tuple[str, str]] = (("gate", "f d"), ("up", "f d"), ("down", "d f"))
    if shape.mixture is None:
        for name, order in dims:
            yield f"block{i}/mlp/{name}", (Stored(f"blk.{i}.ffn_{name}.weight", order),)
        return
    yield f"block{i}/moe/router", (Stored(f"blk.{i}.ffn_gate_inp.weight", "E d"),)
    for e in range(shape.mixture.experts):
        for name, order in dims:
            at = {"e": (e, shape.mixture.experts)}
            yield f"block{i}/moe/expert{e}/{name}", (Stored(f"blk.{i}.ffn_{name}_exps.weight", f"e {order}", at),)
