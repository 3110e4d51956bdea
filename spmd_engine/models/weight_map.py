"""Where each parameter of a decoder is in safetensors files of Hugging Face's format, and in GGUF files."""

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
    that the parameter lacks stands for several parameters in one tensor, and ``at`` says which of them this is: of
    GPT-2's ``"d nhk"`` the query is n = 0 of 3. Of a letter that the parameter has, it may be a part: where each key
    head has its r queries in a tensor, then its key and its value, r has r + 2 numbers, of which the queries are
    ``among`` from 0 on.
    """

    tensor: str
    dims: str
    at: Mapping[str, tuple[int, int]] = field(default_factory=dict)  #: letter -> index of this parameter, of how many
    #: How rotary positions pair the numbers of k in the file, if otherwise than here: see ``RotaryOptions.pairs``.
    pairs: str = ""
    rows: tuple[int, int, int] | None = None  #: these of its rows: first, end, of how many; None: all
    offset: float = 0.0  #: subtracted from what is stored
    #: Letter -> where this parameter's begin, of how many that the tensor has.
    among: Mapping[str, tuple[int, int]] = field(default_factory=dict)


#: A parameter's full name, and the ways in which it may be stored, the first of which is how it is written.
WeightMap = Iterator[tuple[str, tuple[TensorSlice, ...]]]

#: Endings of the names of tensors that are no parameters, but may be stored.
IGNORED = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
#: Names of the head's table: where it is tied, a copy may be stored.
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
    """All parameters of a decoder, in its order, in Hugging Face's format.

    Raises UsageError for one whose rotary pairs the format cannot have.
    """
    family, pairs = FAMILIES[shape.family], ""
    if family.rope is not None and (shape.rotary.pairs, family.rope.pairs) == ("neighbours", "halves"):
        if shape.rotary.part != 1:
            raise UsageError(f"heads of a {shape.family} that rotate in part have pairs that are halves")
        pairs = "halves"
    return _tensors(
        shape.changed(**family.implied), family.modules, pairs, pairs, family.scale_offset, family.transposed
    )


def gguf_weight_map(shape: DecoderConfig) -> WeightMap:
    """All parameters of a decoder, in its order, in a GGUF file."""
    family = FAMILIES[shape.family]
    modules = _GGUF | family.gguf.modules | ({"gate_up": "ffn_up"} if "gate_up" in family.modules else {})
    return _tensors(shape.changed(**family.implied), modules, "neighbours" if family.gguf.reordered else "", "")


def _tensors(
    shape: DecoderConfig, modules: Modules, pairs: str, norm_pairs: str, offset: float = 0.0, transposed: bool = False
) -> WeightMap:
    """All parameters by the names of modules; ``pairs`` are those of queries and keys, where rows are reordered."""
    shared_heads = shape.heads // (shape.key_value_heads or shape.heads)
    queries = "hr" if shared_heads > 1 else "h"

    def at(block: str, name: str, dims: str, kind: str = ".weight", **place: Any) -> tuple[TensorSlice, ...]:
        """In the modules of this name, if there are any: with the prefix of all names or without it."""
        found = modules.get(name, ())
        tensors = [f"{block}{module}{kind}" for module in ((found,) if isinstance(found, str) else found)]
        return tuple(TensorSlice(f"{prefix}{each}", dims, **place) for each in tensors for prefix in prefixes)

    def weight(block: str, name: str, dims: str, **place: Any) -> tuple[TensorSlice, ...]:
        return at(block, name, " ".join(dims.split()[::-1]) if transposed else dims, **place)

    def norm(own: str, block: str, name: str) -> WeightMap:
        if shape.norm != "layer-plain":
            yield f"{own}/scale", at(block, name, "d", offset=offset)
        if shape.norm == "layer":
            yield f"{own}/shift", at(block, name, "d", ".bias")

    def attention(own: str, block: str) -> WeightMap:
        for number, name in enumerate(_QKV):
            heads, turned = (queries if name == "query" else "h"), (pairs if name != "value" else "")
            ways: list[tuple[str, str, dict[str, Any]]] = [
                (name, f"{heads}k d", {}),
                ("rows", f"{heads}k d", {"rows": _rows(shape, number)}),
                ("stacked", "nhk d", {"at": {"n": (number, 3)}}),  # all queries, then all keys, then all values
            ]
            if name == "query" and shared_heads > 1:  # each key head with its queries, its key and its value
                ways.append(("grouped", "hrk d", {"among": {"r": (0, shared_heads + 2)}}))
            else:
                ways.append(("grouped", "hnk d", {"at": {"n": (shared_heads + number - 1, shared_heads + 2)}}))
            yield (
                f"{own}/{name}",
                sum((weight(block, way, dims, pairs=turned, **place) for way, dims, place in ways), ()),
            )
            if shape.bias:
                slices = (at(block, way, dims.split()[0], ".bias", pairs=turned, **place) for way, dims, place in ways)
                yield f"{own}/{name}_bias", sum(slices, ())
        if shape.qk_norm:
            for name, heads in (("query_norm", queries), ("key_norm", "h")):
                dims = f"{heads}k" if shape.qk_norm_all_heads else "k"
                yield f"{own}/{name}", at(block, name, dims, pairs=norm_pairs, offset=offset)
        yield f"{own}/output", weight(block, "output", f"d {queries}k")
        if shape.output_bias:
            yield f"{own}/output_bias", at(block, "output", "d", ".bias")

    def perceptron(own: str, block: str) -> WeightMap:
        for name, dims, bias in _GATED if shape.gated else _PLAIN:
            if "gate_up" in modules and name in ("gate", "up"):
                yield f"{own}/{name}", at(block, "gate_up", "nf d", at={"n": (int(name == "up"), 2)})
                continue
            yield f"{own}/{name}", weight(block, name, dims)
            if shape.mlp_bias:
                yield f"{own}/{bias}", at(block, name, dims[0], ".bias")

    def experts(own: str, block: str) -> WeightMap:
        """Each in tensors of its own, or all of a layer in one, perhaps gate and up side by side."""
        mixture = shape.mixture
        assert mixture is not None
        count, shared = mixture.experts, mixture.shared
        yield f"{own}/router", at(block, "router", "E d", "")
        for e in range(count):
            for name, dims, _ in _GATED:
                slices = at(block, f"expert/{name}", dims, "")
                slices = tuple(TensorSlice(each.tensor.format(e), dims) for each in slices)
                slices += at(block, f"experts/{name}", f"e {dims}", "", at={"e": (e, count)})
                if name != "down":
                    place = {"e": (e, count), "n": (int(name == "up"), 2)}
                    slices += at(block, "experts/gate_up", f"e n{dims}", "", at=place)
                yield f"{own}/expert{e}/{name}", slices
        for number in range(shared):
            for name, dims, _ in _GATED:
                place = {"n": (number, shared)}
                yield f"{own}/shared{number}/{name}", at(block, f"shared/{name}", dims.replace("f", "nf"), "", at=place)
        if mixture.shared_gate:
            row = at(block, "shared_gate_row", "n d", "", at={"n": (0, 1)})
            yield f"{own}/shared_gate", at(block, "shared_gate", "d", "") + row

    prefixes = dict.fromkeys((modules[""], ""))
    yield "embedding/table", at("", "embedding", "v d")
    if shape.embedding_norm:
        yield from norm("embedding_norm", "", "embedding_norm")
    if shape.learned_positions:
        yield "positions/table", at("", "positions", "p d")
    for i in range(shape.layers):
        own, block = f"block{i}" if shape.parallel == "none" else f"block{i}/parallel", f"{modules['block']}{i}."
        routed = shape.mixture is not None and shape.mixture.is_routed(i, shape.layers)
        second = f"{own}/moe" if routed else f"{own}/mlp"
        if shape.parallel == "one-norm":
            yield from norm(f"{own}/norm", block, "block/norm")
        elif shape.norm_position != "after":
            yield from norm(f"{own}/attention/norm", block, "attention/norm")
        yield from attention(f"{own}/attention", block)
        if shape.norm_position != "before":
            yield from norm(f"{own}/attention/norm_after", block, "attention/norm_after")
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
    """Rows of queries, keys or values in a tensor of all three, one behind the other: first, end, and of how many."""
    width, shared = shape.head_width or shape.width // shape.heads, shape.key_value_heads or shape.heads
    ends = (0, shape.heads * width, (shape.heads + shared) * width, (shape.heads + 2 * shared) * width)
    return ends[number], ends[number + 1], ends[-1]
