"""Mistral, Ministral and Mixtral."""

from typing import Any

from spmd_engine.models.families import family
from spmd_engine.models.families.family import Experts, Family, Gguf, Rope, SlidingWindow

_MIXTRAL_EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}
_FIELDS = family.RMS | family.defaults(context=131072, epsilon=1e-6)
MISTRAL = Family(
    "mistral",
    "a Llama with `sliding_window`",
    _FIELDS,
    windows=SlidingWindow(4096, listed=False),
    multimodal={
        "mistral3": {
            "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
            "sliding_window": None
        }
    },
    gguf=Gguf("mistral3", reordered=True)
)  # fmt: skip
MINISTRAL = Family(
    "ministral",
    "a Llama with windows (`layer_types`)",
    _FIELDS | family.defaults(key_value_heads=8),
    windows=SlidingWindow(4096),
)
MIXTRAL = Family(
    "mixtral",
    "[experts](experts.md): softmax over all, the best k, whose weights sum to 1",
    _FIELDS | family.defaults(epsilon=1e-5),
    family.LLAMA_ATTENTION | family.EXPERTS | {
        "router": ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        **{f"expert/{name}": f"block_sparse_moe.experts.{{}}.{w}.weight" for name, w in _MIXTRAL_EXPERTS.items()}
    },
    rope=Rope(1e6),
    windows=SlidingWindow(listed=False),
    experts=Experts(8, 2, "num_local_experts", normalised=True, gguf_normalised=True),
    gguf=Gguf("llama", lambda facts: facts.get("expert_count"), reordered=True)
)  # fmt: skip


# --- Ministral 3: queries have a factor, which is 1 up to the context before positions were scaled


def _up_to(context: int, shape: Any) -> Any:
    return shape.changed(context=min(shape.context, context))


def _write_ministral3(shape: Any) -> dict[str, Any]:
    from spmd_engine.models.hf.rope import rope_fields

    return {"rope_parameters": rope_fields(shape.rotary) | {"llama_4_scaling_beta": 0.1}, "rope_scaling": None}


MINISTRAL3 = Family(
    "ministral3",
    "a Llama with `yarn` positions, up to `original_max_position_embeddings`: beyond it queries have a factor",
    family.RMS | family.defaults(context=262144, key_value_heads=8, head_width=128),
    required={"sliding_window": None},
    rope=Rope(1e6, ignored=("llama_4_scaling_beta", "max_position_embeddings")),
    read=lambda config, shape: _up_to(config["rope_parameters"]["original_max_position_embeddings"], shape),
    write=_write_ministral3,
    gguf=Gguf(
        "mistral3",
        lambda facts: facts.get("rope.scaling.type") == "yarn",
        reordered=True,
        ignored=("attention.temperature_scale",),
        read=lambda facts, tensors, shape: _up_to(shape.rotary.original_context, shape),
    ),
)
