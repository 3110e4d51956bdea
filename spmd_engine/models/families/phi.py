"""Phi 1, 1.5 and 2, and Phi-3."""

from typing import Any

from spmd_engine.models.families import family
from spmd_engine.models.families.family import Family, Gguf, Rope, SlidingWindow


def _write_phi3(shape: Any) -> dict[str, Any]:
    divided = shape.rotary.scaling == "divided"
    return {"original_max_position_embeddings": shape.rotary.original_context} if divided else {}


PHI = Family(
    "phi",
    "layer norms, rotary positions of a part of each head, attention and perceptron behind one norm; biases",
    family.SIZES | family.GROUPED | {"activation": ("hidden_act", "gelu_new")},
    family.ATTENTION | {
        "": "model.", "embedding": "embed_tokens", "norm": "final_layernorm", "block": "layers.",
        "block/norm": "input_layernorm", "output": "self_attn.dense", "w0": "mlp.fc1", "w1": "mlp.fc2"
    },
    family.GPT_CONSTANTS | {"bias": True, "output_bias": True, "parallel": "one-norm", "head_bias": True},
    rope=Rope(part=0.5),
    gguf=Gguf("phi2")
)  # fmt: skip
PHI3 = Family(
    "phi3",
    "queries, keys and values in one tensor, gate and up in one; `partial_rotary_factor`, `longrope` (up to "
    "`original_max_position_embeddings`)",
    family.RMS | family.defaults(context=4096),
    family.without(family.LLAMA_ATTENTION, "query", "key", "value") | {"rows": "self_attn.qkv_proj"} | family.GATE_UP,
    ignored=("original_max_position_embeddings",),
    rope=Rope(part=1.0, kinds={"yarn": "longrope"}),
    windows=SlidingWindow(listed=False),
    write=_write_phi3,
    gguf=Gguf("phi3", joins_rows=True, window=0),
)
