"""Qwen 2 and 3, with or without experts."""

from typing import Any

from spmd_engine.models.families import family
from spmd_engine.models.families.family import Config, Experts, Family, Gguf, SlidingWindow


def _from_layer(config: Config, shape: Any, layer: int) -> bool:
    return layer >= config.get("max_window_layers", 28)


def _even_up_to_layer(config: Config, shape: Any, layer: int) -> bool:
    return layer % 2 == 0 and layer < config.get("max_window_layers", 28)


_FIELDS = family.RMS | family.defaults(context=32768, epsilon=1e-6)
_QWEN3_FIELDS = _FIELDS | family.ATTENTION_BIAS | family.defaults(head_width=128)
QWEN2 = Family(
    "qwen2",
    "a Llama with biases of queries, keys and values",
    _FIELDS,
    constants={"bias": True},
    windows=SlidingWindow(switch=True, has_window=_from_layer),
    gguf=Gguf("qwen2"),
)
QWEN3 = Family(
    "qwen3",
    "a Llama with norms of queries and keys, and `head_dim` apart from the width",
    _QWEN3_FIELDS,
    constants={"qk_norm": True},
    windows=SlidingWindow(switch=True, has_window=_from_layer),
    gguf=Gguf("qwen3"),
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "a Qwen 2 with experts, and one for all tokens, weighted by a sigmoid, whose width is a multiple of the others'",
    _FIELDS | {"bias": ("qkv_bias", True)},
    family.LLAMA_MODULES | family.EXPERTS | {
        "shared/gate": "mlp.shared_expert.gate_proj.weight", "shared/up": "mlp.shared_expert.up_proj.weight",
        "shared/down": "mlp.shared_expert.down_proj.weight", "shared_gate_row": "mlp.shared_expert_gate.weight"
    },
    {"bias": True},
    windows=SlidingWindow(switch=True, has_window=_even_up_to_layer),
    experts=Experts(60, 4, hidden=1408, shared_hidden=5632),
    gguf=Gguf("qwen2moe")
)  # fmt: skip
QWEN3_MOE = Family(
    "qwen3_moe",
    "a Qwen 3 with experts; `norm_topk_prob`, `mlp_only_layers`, `decoder_sparse_step`",
    _QWEN3_FIELDS,
    family.LLAMA_MODULES | family.EXPERTS,
    {"qk_norm": True},
    windows=SlidingWindow(switch=True, listed=False),
    experts=Experts(128, 8, hidden=768, gguf_normalised=True),
    gguf=Gguf("qwen3moe"),
)
