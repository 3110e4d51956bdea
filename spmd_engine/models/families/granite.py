"""Granite, with or without experts, and Granite 4 without Mamba layers."""

from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.families import family
from spmd_engine.models.families.family import Config, Experts, Family, Gguf
from spmd_engine.models.mixture import as_text

_FIELDS = family.RMS | family.ATTENTION_BIAS | {
    "epsilon": ("rms_norm_eps", 1e-6), "embedding_scale": ("embedding_multiplier", 1.0),
    "residual_scale": ("residual_multiplier", 1.0), "attention_scale": ("attention_multiplier", 1.0),
    "logits_divisor": ("logits_scaling", 1.0)
}  # fmt: skip
_GGUF_VALUES = {
    "embedding_scale": "embedding_scale", "residual_scale": "residual_scale", "attention_scale": "attention.scale",
    "logits_divisor": "logit_scale"
}  # fmt: skip
_GRANITE3 = {"rope.scaling.finetuned": True}  # Granite 4 has no positions
GRANITE = Family(
    "granite",
    "a Llama with `embedding_multiplier`, `residual_multiplier`, `attention_multiplier`, `logits_scaling`",
    _FIELDS | family.MLP_BIAS,
    family.LLAMA_MODULES,
    gguf=Gguf("granite", reordered=True, values=_GGUF_VALUES, needed=("logit_scale",), required=_GRANITE3),
)
GRANITEMOE = Family(
    "granitemoe",
    "a Granite with experts, of which each layer keeps all in two tensors",
    _FIELDS,
    family.LLAMA_ATTENTION
    | {
        "router": ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
        "experts/gate_up": ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        "experts/down": ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    },
    architecture="GraniteMoeForCausalLM",
    experts=Experts(8, 2, "num_local_experts", normalised=True, gguf_normalised=True),
    gguf=Gguf("granitemoe", reordered=True, values=_GGUF_VALUES, required=_GRANITE3),
)


def _read_hybrid(config: Config, shape: Any) -> Any:
    """Read a model without Mamba layers and experts, with rotary positions in all layers or in none."""
    family.check_required("num_local_experts", config.get("num_local_experts", 8), 0)
    for name in config:
        if name.startswith(("mamba_", "time_step_")):
            config.get(name)
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
    if unknown := sorted(set(kinds) - {"attention", "full_attention"}):
        raise UsageError(f"layer_types has {unknown[0]!r}, which is not supported")
    positions = config.get("position_embedding_type") or "nope"
    if positions == "rope":
        return shape
    family.check_required("position_embedding_type", positions, "nope")
    return shape.changed(no_rope_layers=as_text(range(shape.layers)))


def _write_hybrid(shape: Any) -> dict[str, Any]:
    rotates = [shape.has_rope(layer) for layer in range(shape.layers)]
    if any(rotates) and not all(rotates):
        raise UsageError("a granitemoehybrid must have rotary positions in all blocks, or in none")
    return {
        "num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": shape.hidden,
        "layer_types": ["attention"] * shape.layers, "position_embedding_type": "rope" if rotates[0] else "nope",
        "mamba_n_heads": 1,  # unused, but readers check that it divides the width
    }  # fmt: skip


GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    "Granite 4 without Mamba and experts (`micro`, `350m`, `1b`)",
    _FIELDS | {"hidden": ("shared_intermediate_size", 1024)},
    family.LLAMA_ATTENTION | {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"},
    architecture="GraniteMoeHybridForCausalLM",
    also_read=("no_rope_layers",),
    required={"normalization_function": "rmsnorm"},
    ignored=("layers_block_type", "intermediate_size", "num_experts_per_tok", "init_method"),
    read=_read_hybrid,
    write=_write_hybrid,
)
