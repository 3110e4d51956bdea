"""MiniCPM."""

from math import sqrt
from typing import Any

from spmd_engine.models.families import family
from spmd_engine.models.families.family import ATTENTION_BIAS, LLAMA_MODULES, RMS, TIED, Config, Family, Gguf


def _read(config: Config, shape: Any) -> Any:
    depth, base = config.get("scale_depth"), config.get("dim_model_base")
    return shape.changed(
        embedding_scale=float(config.get("scale_emb") or 1),
        residual_scale=float(depth) / sqrt(shape.layers) if depth else 1.0,
        logits_divisor=shape.width / base if base else 1.0,
    )


def _write(shape: Any) -> dict[str, Any]:
    return {
        "scale_emb": shape.embedding_scale,
        "scale_depth": shape.residual_scale * sqrt(shape.layers),
        "dim_model_base": shape.width / shape.logits_divisor,
    }


_FACTORS = {"embedding_scale": "embedding_scale", "residual_scale": "residual_scale", "logits_divisor": "logit_scale"}
MINICPM = Family(
    "minicpm",
    "a Granite with other fields; transformers does not have it, so the tests compare it with that Granite",
    RMS | TIED | ATTENTION_BIAS | family.defaults(context=32768, epsilon=1e-6),
    LLAMA_MODULES,
    architecture="MiniCPMForCausalLM",
    also_read=tuple(_FACTORS),
    ignored=("mup_denominator",),  # used in training only
    read=_read,
    write=_write,
    gguf=Gguf("minicpm", reordered=True, values=_FACTORS, needed=tuple(_FACTORS.values())),
)
