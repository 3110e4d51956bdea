"""What the models of each family have in common, and what a ``config.json`` of a family can say of one."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

from spmd_engine.errors import UsageError, one_of
from spmd_engine.models.decoder import DecoderConfig

_EXPERTS = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granitemoe")
_GRANITES = ("granite", "granitemoe")
_SCALED = (*_GRANITES, "minicpm", "granitemoehybrid")  # what is looked up, what branches add, and logits
_COHERES = ("cohere", "cohere2")
_GEMMAS = ("gemma", "gemma2", "gemma3-text")
_OLMOS = ("olmo2", "olmo3")
_GLMS = ("glm", "glm4")
#: Families whose rows of queries and keys are put in another order on the way, if neighbours are turned.
_PUT_IN_ORDER = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", *_EXPERTS, "smollm3", "granite", "minicpm", *_GEMMAS, *_OLMOS,
)  # fmt: skip
#: Families that have a word for the biases of queries, keys and values, and one for the output's, or none.
_OTHER_OUTPUT = ("qwen2-moe", "stablelm", "seed-oss", "helium", *_GLMS)
#: Fields of a DecoderConfig of which not every config speaks, and the families of which one does.
_SAID_BY = {
    "bias": (
        "llama", "qwen2-moe", "qwen3", "qwen3-moe", "smollm3", *_SCALED, *_GEMMAS, *_OLMOS, "olmoe", "gpt-neox",
        "stablelm", "starcoder2", "olmo", *_COHERES, "falcon", "arcee", "seed-oss", *_GLMS, "ernie4-5", "helium",
        "hunyuan-v1-dense", "nemotron", "jais2", "internlm3", "internlm2",
    ),
    "query_key_norm": (),
    "norm_together": (),
    "learned": (),
    "unused_positions": (),
    "norm": (),
    "norms": (),
    "parallel": ("gpt-neox", "stablelm", "falcon"),
    "gated": (),
    "activation": (
        "llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "granite", "minicpm", *_OLMOS, "gpt-neo", "gpt-neox",
        "opt", "phi", "stablelm", "starcoder2", "olmo", *_COHERES, "gptj", "falcon", "arcee", "seed-oss", "exaone4",
        *_GLMS,
        "ernie4-5", "helium", "hunyuan-v1-dense", "nemotron", "jais2", "cwm", "ministral", "internlm3", "internlm2",
        "gpt-bigcode", "exaone", "granitemoehybrid", "ministral3",
    ),
    "perceptron_bias": (
        "llama", "granite", "starcoder2", "falcon", "arcee", "seed-oss", "ernie4-5", "helium", "nemotron", "jais2",
        "cwm", "internlm3",
    ),
    "turned_first": (),
    "alibi": ("mpt",),
    "embedding_norm": (),
    "unturned": ("smollm3", "cohere2", "exaone4", "granitemoehybrid"),
    "rotary_in_window": ("gemma3-text", "olmo3"),
    "embedding_scale": _SCALED,
    "residual_scale": _SCALED,
    "attention_scale": (*_GRANITES, "granitemoehybrid", "gemma2", "gemma3-text", "mpt"),
    "attention_cap": ("gemma2",),
    "logits_divisor": (*_SCALED, *_COHERES),
    "logits_cap": ("gemma2",),
    "head_bias": (),
}  # fmt: skip
#: Activations as configs call them, and here; the first of those that mean the same is what is written.
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu",
    "gelu": "gelu-erf", "relu": "relu", "relu2": "relu-squared",
}  # fmt: skip


def says(family: str, name: str) -> bool:
    """Whether a config of this family speaks of this field of a DecoderConfig."""
    return name not in _SAID_BY or family in _SAID_BY[name]


def activation_said(name: Any) -> str:
    """What an activation is called here; raises UsageError for one that is not known."""
    if name not in _ACTIVATIONS:
        raise UsageError(f"the activation {name!r} is not known here; {one_of(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def words_for_activation(activation: str) -> str:
    """The inverse."""
    return next(said for said, own in _ACTIVATIONS.items() if own == activation)


def always(family: str, width: int) -> dict[str, Any]:
    """What is not as by default in all models of a family of this width, where its config is silent: fields by name."""
    found: dict[str, Any] = {}
    if family in ("qwen2", "qwen2-moe", "phi", "opt", "gpt-bigcode", "bloom"):
        found["bias"] = True
    if family in ("gpt-neo", "phi", "opt", "gpt-bigcode", "bloom"):
        found["output_bias"] = True
    if family in ("qwen3", "qwen3-moe", "gemma3-text", *_OLMOS, "olmoe", "exaone4", "hunyuan-v1-dense"):
        found["query_key_norm"] = True
    if family in (*_OLMOS, "olmoe"):
        found["norm_together"] = True
    if family in (*_OLMOS, "exaone4"):
        found["norms"] = "after"
    if family in _GEMMAS:
        found |= {"activation": "gelu", "embedding_scale": sqrt(width)}
    if family in ("gemma2", "gemma3-text", "glm4"):
        found["norms"] = "both"
    if family in ("arcee", "nemotron", "jais2"):
        found |= {"gated": False, "activation": "relu-squared"}
    if family in ("nemotron", "jais2"):
        found["norm"] = "layer"
    if family == "hunyuan-v1-dense":
        found["turned_first"] = True
    if family == "bloom":
        found |= {"alibi": 8.0, "embedding_norm": True}
    if family == "mpt":
        found |= {"norm": "layer-scale", "gated": False, "activation": "gelu-erf", "alibi": 8.0}
    if family in ("gpt-neo", "gpt-neox", "opt", "phi", "starcoder2", "stablelm", "gpt-bigcode", "bloom"):
        found["norm"] = "layer"
    if family in ("gpt-neo", "gpt-neox", "opt", "phi", "starcoder2", "gpt-bigcode", "bloom"):
        found |= {"gated": False, "activation": "gelu", "perceptron_bias": True}
    if family in ("gpt-neo", "opt", "gpt-bigcode"):
        found["learned"] = True
    if family in ("gptj", "falcon"):
        found |= {"norm": "layer", "gated": False, "parallel": "one-norm"}
    if family == "gptj":
        found |= {"activation": "gelu", "perceptron_bias": True, "head_bias": True}
    if family == "falcon":
        found["activation"] = "gelu-erf"
    if family == "olmo":
        found["norm"] = "layer-plain"
    if family in _COHERES:
        found |= {"norm": "layer-scale", "parallel": "one-norm"}
    if family == "gpt-neo":
        found["attention_scale"] = 1.0
    if family == "opt":
        found["unused_positions"] = 2
    if family == "phi":
        found |= {"parallel": "one-norm", "head_bias": True}
    return found


def unsayable(shape: DecoderConfig) -> Iterator[str]:
    """Fields that are not as in all models of the family, though its config cannot say so."""
    family = shape.family
    usual = DecoderConfig(family=family).changed(**always(family, shape.width))
    for name in _SAID_BY:
        if not says(family, name) and getattr(shape, name) != getattr(usual, name):
            yield name
    one_word = says(family, "bias") and family not in _OTHER_OUTPUT
    if family != "seed-oss" and shape.output_bias != (usual.output_bias or shape.bias and one_word):
        yield "output_bias"
    if family in ("starcoder2", "falcon", "ernie4-5", "internlm3") and shape.perceptron_bias != shape.bias:
        yield "perceptron_bias"
    if shape.rotary.part != 1 and family not in ("phi3", "phi", "gpt-neox", "stablelm", "gptj", "nemotron", *_GLMS):
        yield "rotary"
    of_neighbours = family in (*_COHERES, *_GLMS, "gptj", "ernie4-5", "helium")
    if (shape.rotary.pairs == "neighbours") != of_neighbours and family not in _PUT_IN_ORDER:
        yield "rotary"
    if (shape.mixture is not None) != (family in _EXPERTS):
        yield "mixture"
