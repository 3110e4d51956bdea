"""Tencent's Hunyuan."""

from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.layers import RotaryOptions
from spmd_engine.models.families import family
from spmd_engine.models.families.family import Config, Family, Gguf, Rope


def _rotary(config: Config, shape: Any) -> RotaryOptions:
    """``dynamic`` with an ``alpha`` has the base theta · alpha^(k / (k - 2)) at all positions."""
    from spmd_engine.models.hf.rope import rotary_of_config

    width = shape.head_width or shape.width // shape.heads
    family.check_required("attention_head_dim", config.get("attention_head_dim") or width, width)
    ropes = {name: dict(rope) for name in ("rope_scaling", "rope_parameters") if (rope := config.get(name))}
    dynamic = [rope for rope in ropes.values() if "dynamic" in (rope.get("rope_type"), rope.get("type"))]
    alphas = {float(rope.get("alpha") or 1) for rope in dynamic} or {1.0}
    for rope in dynamic:
        for name in ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):  # without effect except alpha
            rope.pop(name, None)
    if len(alphas) > 1:
        raise UsageError(f"rope_scaling and rope_parameters differ in alpha: {sorted(alphas)}")
    rotary = rotary_of_config({**config, **ropes}, shape, Rope())
    return rotary.changed(theta=rotary.theta * alphas.pop() ** (width / (width - 2)))


HUNYUAN_V1_DENSE = Family(
    "hunyuan_v1_dense",
    "a Llama whose queries and keys are normalised after they rotate; `dynamic` positions with an `alpha`",
    family.RMS | family.ATTENTION_BIAS,
    family.LLAMA_MODULES | {"query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm"},
    {"qk_norm": True, "rope_before_norm": True},
    architecture="HunYuanDenseV1ForCausalLM",
    required={
        "use_qk_norm": True, "norm_type": "rms", "use_rotary_pos_emb": True, "use_cla": False, "num_experts": 1,
        "position_embedding_xdrope": False, "mlp_bias": False, "add_classification_head": False
    },
    rope=Rope(read=_rotary),
    gguf=Gguf("hunyuan-dense")
)  # fmt: skip
