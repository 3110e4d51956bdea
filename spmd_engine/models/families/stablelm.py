"""StableLM."""

from typing import Any

from spmd_engine.models.families import family
from spmd_engine.models.families.family import GROUPED, LLAMA_MODULES, SILU, SIZES, Config, Family, Gguf, Rope, same
from spmd_engine.models.families.gpt_neo import read_parallel, write_parallel


def _read_gguf(facts: Config, tensors: Any, shape: Any) -> Any:
    """Parallel branches are recognized by the norms: some files do not have ``use_parallel_residual``."""
    return shape if "blk.0.ffn_norm.weight" in tensors else shape.changed(parallel="one-norm")


def _write_gguf(shape: Any) -> dict[str, Any]:
    return {"use_parallel_residual": shape.parallel == "one-norm"}


STABLELM = Family(
    "stablelm",
    "layer norms, rotary positions of a part of each head; `use_parallel_residual`: attention and perceptron behind "
    "one norm",
    SIZES | SILU | GROUPED | same("use_qkv_bias", "bias") | family.defaults(context=4096),
    LLAMA_MODULES | {"block/norm": "input_layernorm"},
    {"norm": "layer"},
    architecture="StableLmForCausalLM",
    also_read=("parallel",),
    rope=Rope(part=0.25),
    read=read_parallel,
    write=write_parallel,
    gguf=Gguf("stablelm", read=_read_gguf, write=_write_gguf),
)
