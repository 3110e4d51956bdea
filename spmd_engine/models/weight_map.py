"""Maps each parameter of a decoder to its place in safetensors files of Hugging Face's format and in GGUF files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.families.family import Modules


@dataclass(frozen=True)
class TensorSlice:
    """A parameter in a tensor of a file: the tensor's dims, as words of the parameter's letters.

    A query's weights d h r k are stored as ``"hrk d"``: two dims, the first of which runs over h, r and k. A letter
    that the parameter lacks numbers the parameters in one tensor, and ``at`` is the number of this one: in GPT-2's
    ``"d nhk"`` the query is n = 0 of 3. A parameter may be a part of the tensor along one of its letters, given by
    ``among``: if a tensor has r queries, a key and a value for each key head, its r has r + 2 numbers, and the queries
    begin at 0.
    """

    tensor: str
    dims: str
    at: Mapping[str, tuple[int, int]] = field(default_factory=dict)  #: letter -> (index, number) of parameters
    #: The rotary pairs of k in the file, if they differ from the model's: see ``RotaryOptions.pairs``.
    pairs: str = ""
    rows: tuple[int, int, int] | None = None  #: rows of the tensor: first, end, total; None: all
    offset: float = 0.0  #: subtracted from the stored values
    #: Letter -> (start of this parameter, length in the tensor).
    among: Mapping[str, tuple[int, int]] = field(default_factory=dict)


#: A parameter's full name, and its possible places in files, the first of which is written.
WeightMap = Iterator[tuple[str, tuple[TensorSlice, ...]]]

#: Endings of the names of stored tensors that are not parameters.
IGNORED = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
#: Names of the head's table; a copy may be stored even if it is tied.
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_QKV = ("query", "key", "value")
#: The dims of a perceptron's weights in a file, and the names of its biases.
_GATED = (("gate", "f d", "gate_bias"), ("up", "f d", "up_bias"), ("down", "d f", "down_bias"))
_PLAIN = (("w0", "f d", "b0"), ("w1", "d f", "b1"))
_GGUF: Modules = {
    "": "", "embedding": "token_embd", "embedding_norm": "token_embd_norm", "positions": "position_embd",
    "norm": "output_norm", "head": "output", "block": "blk.", "block/norm": "attn_norm", "attention/norm": "attn_norm",
    "query": "attn_q", "key": "attn_k", "value": "attn_v", "rows": "attn_qkv", "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm", "output": "attn_output", "attention/norm_after": "post_attention_norm",
    "mlp/norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "w0": "ffn_up", "w1": "ffn_down",
    "mlp/norm_after": "post_ffw_norm", "router": "ffn_gate_inp.weight", "experts/gate": "ffn_gate_exps.weight",
    "experts/up": "ffn_up_exps.weight", "experts/down": "ffn_down_exps.weight", "shared/gate": "ffn_gate_shexp.weight",
    "shared/up": "ffn_up_shexp.weight", "shared/down": "ffn_down_shexp.weight",
    "shared_gate": "ffn_gate_inp_shexp.weight"
}  # fmt: skip


def weight_map(shape: DecoderConfig) -> WeightMap:
    """Yield all parameters of a decoder, in its order, with their places in Hugging Face's format.

    Raises UsageError for rotary pairs that the format cannot represent.
    """
    family, pairs = FAMILIES[shape.family], ""
    if family.rope is not None and (shape.rotary.pairs, family.rope.pairs) == ("neighbours", "halves"):
        if shape.rotary.part != 1:
            raise UsageError(f"a {shape.family} whose heads rotate in part must have rotary pairs of halves")
        pairs = "halves"
    return _tensors(
        shape.changed(**family.implied), family.modules, pairs, pairs, family.scale_offset, family.transposed
    )


def gguf_weight_map(shape: DecoderConfig, *, written: bool = False) -> WeightMap:
    """Yield all parameters of a decoder, in its order, with their places in a GGUF file.

    A file that is ``written`` has queries, keys and values in one tensor where llama.cpp looks for it.
    """
    family = FAMILIES[shape.family]
    modules = _GGUF | family.gguf.modules | ({"gate_up": "ffn_up"} if "gate_up" in family.modules else {})
    if written and family.gguf.joins_rows:
        modules = {name: module for name, module in modules.items() if name not in _QKV}
    return _tensors(shape.changed(**family.implied), modules, "neighbours" if family.gguf.reordered else "", "")


def _tensors(
    shape: DecoderConfig, modules: Modules, pairs: str, norm_pairs: str, offset: float = 0.0, transposed: bool = False
) -> WeightMap:
    """Yield all parameters, by names of modules; ``pairs`` are the rotary pairs of reordered queries and keys."""
    shared_heads = shape.heads // (shape.key_value_heads or shape.heads)
    queries = "hr" if shared_heads > 1 else "h"

    def at(block: str, name: str, dims: str, kind: str = ".weight", **place: Any) -> tuple[TensorSlice, ...]:
        """Return the places in the modules of a name, if any: with the prefix of all names and without it."""
        names = modules.get(name, ())
        tensors = [f"{block}{module}{kind}" for module in ((names,) if isinstance(names, str) else names)]
        return tuple(TensorSlice(f"{prefix}{tensor}", dims, **place) for tensor in tensors for prefix in prefixes)

    def weight(block: str, name: str, dims: str, **place: Any) -> tuple[TensorSlice, ...]:
        return at(block, name, " ".join(dims.split()[::-1]) if transposed else dims, **place)

    def norm(layer: str, block: str, name: str) -> WeightMap:
        if shape.norm != "layer-plain":
            yield f"{layer}/scale", at(block, name, "d", offset=offset)
        if shape.norm == "layer":
            yield f"{layer}/shift", at(block, name, "d", ".bias")

    def attention(layer: str, block: str) -> WeightMap:
        for number, name in enumerate(_QKV):
            heads, rotary = (queries if name == "query" else "h"), (pairs if name != "value" else "")
            forms: list[tuple[str, str, dict[str, Any]]] = [
                (name, f"{heads}k d", {}),
                ("rows", f"{heads}k d", {"rows": _rows(shape, number)}),
                ("stacked", "nhk d", {"at": {"n": (number, 3)}}),  # all queries, then all keys, then all values
            ]
            if name == "query" and shared_heads > 1:  # each key head with its queries, its key and its value
                forms.append(("grouped", "hrk d", {"among": {"r": (0, shared_heads + 2)}}))
            else:
                forms.append(("grouped", "hnk d", {"at": {"n": (shared_heads + number - 1, shared_heads + 2)}}))
            yield (
                f"{layer}/{name}",
                sum((weight(block, kind, dims, pairs=rotary, **place) for kind, dims, place in forms), ()),
            )
            if shape.bias:
                bias = (at(block, kind, dims.split()[0], ".bias", pairs=rotary, **place) for kind, dims, place in forms)
                yield f"{layer}/{name}_bias", sum(bias, ())
        if shape.qk_norm:
            for name, heads in (("query_norm", queries), ("key_norm", "h")):
                dims = f"{heads}k" if shape.qk_norm_all_heads else "k"
                yield f"{layer}/{name}", at(block, name, dims, pairs=norm_pairs, offset=offset)
        yield f"{layer}/output", weight(block, "output", f"d {queries}k")
        if shape.output_bias:
            yield f"{layer}/output_bias", at(block, "output", "d", ".bias")

    def perceptron(layer: str, block: str) -> WeightMap:
        for name, dims, bias in _GATED if shape.gated else _PLAIN:
            if "gate_up" in modules and name in ("gate", "up"):
                yield f"{layer}/{name}", at(block, "gate_up", "nf d", at={"n": (int(name == "up"), 2)})
                continue
            yield f"{layer}/{name}", weight(block, name, dims)
            if shape.mlp_bias:
                yield f"{layer}/{bias}", at(block, name, dims[0], ".bias")

    def experts(layer: str, block: str) -> WeightMap:
        """Yield the experts: each in its own tensors, or all of a layer in one, possibly with gate and up together."""
        mixture = shape.mixture
        assert mixture is not None
        count, shared = mixture.experts, mixture.shared
        yield f"{layer}/router", at(block, "router", "E d", "")
        for e in range(count):
            for name, dims, _ in _GATED:
                slices = at(block, f"expert/{name}", dims, "")
                slices = tuple(TensorSlice(x.tensor.format(e), dims) for x in slices)
                slices += at(block, f"experts/{name}", f"e {dims}", "", at={"e": (e, count)})
                if name != "down":
                    place = {"e": (e, count), "n": (int(name == "up"), 2)}
                    slices += at(block, "experts/gate_up", f"e n{dims}", "", at=place)
                yield f"{layer}/expert{e}/{name}", slices
        for s in range(shared):
            for name, dims, _ in _GATED:
                place = {"n": (s, shared)}
                yield f"{layer}/shared{s}/{name}", at(block, f"shared/{name}", dims.replace("f", "nf"), "", at=place)
        if mixture.shared_gate:
            row = at(block, "shared_gate_row", "n d", "", at={"n": (0, 1)})
            yield f"{layer}/shared_gate", at(block, "shared_gate", "d", "") + row

    prefixes = dict.fromkeys((modules[""], ""))
    yield "embedding/table", at("", "embedding", "v d")
    if shape.embedding_norm:
        yield from norm("embedding_norm", "", "embedding_norm")
    if shape.learned_positions:
        yield "positions/table", at("", "positions", "p d")
    for i in range(shape.layers):
        layer, block = f"block{i}" if shape.parallel == "none" else f"block{i}/parallel", f"{modules['block']}{i}."
        routed = shape.mixture is not None and shape.mixture.is_routed(i, shape.layers)
        second = f"{layer}/moe" if routed else f"{layer}/mlp"
        if shape.parallel == "one-norm":
            yield from norm(f"{layer}/norm", block, "block/norm")
        elif shape.norm_position != "after":
            yield from norm(f"{layer}/attention/norm", block, "attention/norm")
        yield from attention(f"{layer}/attention", block)
        if shape.norm_position != "before":
            yield from norm(f"{layer}/attention/norm_after", block, "attention/norm_after")
        if shape.parallel != "one-norm" and shape.norm_position != "after":
            yield from norm(f"{second}/norm", block, "mlp/norm")
        yield from experts(second, block) if routed else perceptron(second, block)
        if shape.norm_position != "before":
            yield from norm(f"{second}/norm_after", block, "mlp/norm_after")
    yield from norm("norm", "", "norm")
    prefixes = {"": None}
    modules = {"head": "lm_head", **modules}
    if not shape.tied:
        yield "head/table", at("", "head", "v d")
    if shape.head_bias:
        yield "head/bias", at("", "head", "v", ".bias")


def _rows(shape: DecoderConfig, number: int) -> tuple[int, int, int]:
    """Return the rows of queries, keys or values in a tensor of all three in this order: first, end and total."""
    width, shared = shape.width_of_heads, shape.key_value_heads or shape.heads
    ends = (0, shape.heads * width, (shape.heads + shared) * width, (shape.heads + 2 * shared) * width)
    return ends[number], ends[number + 1], ends[-1]
