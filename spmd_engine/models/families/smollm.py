"""SmolLM 3."""

from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.families import family
from spmd_engine.models.families.family import Config, Family, Gguf, Rope, SlidingWindow
from spmd_engine.models.mixture import as_text


def _read(config: Config, shape: Any) -> Any:
    """``no_rope_layers`` is 1 for layers with rotary positions."""
    rotates = config.get("no_rope_layers")
    if rotates is None:
        every = config.get("no_rope_layer_interval", 4)
        rotates = [(layer + 1) % every for layer in range(shape.layers)]
    if len(rotates) != shape.layers:
        raise UsageError(f"no_rope_layers has {len(rotates)} values, but there are {shape.layers} layers")
    return shape.changed(no_rope_layers=as_text(layer for layer in range(shape.layers) if not rotates[layer]))


def _read_gguf(facts: Config, tensors: Any, shape: Any) -> Any:
    return shape.changed(no_rope_layers=as_text(block for block in range(shape.layers) if block % 4 == 3))


SMOLLM3 = Family(
    "smollm3",
    "a Llama with layers without rotary positions (`no_rope_layers`)",
    family.RMS | family.TIED | family.ATTENTION_BIAS | family.defaults(context=32768, epsilon=1e-6),
    family.LLAMA_MODULES,
    architecture="SmolLM3ForCausalLM",
    also_read=("no_rope_layers",),
    rope=Rope(2e6),
    windows=SlidingWindow(switch=True, has_window=lambda config, shape, layer: not shape.has_rope(layer)),
    read=_read,
    write=lambda shape: {"no_rope_layers": [int(shape.has_rope(layer)) for layer in range(shape.layers)]},
    gguf=Gguf("smollm3", reordered=True, read=_read_gguf),
)
