"""Models to plan for, by name or by file: TOML with the sizes of a GPT, ``config.json`` of Hugging Face, or GGUF."""

from __future__ import annotations

from pathlib import Path

from spmd_engine.engine import ModelConfig, ParallelConfig
from spmd_engine.errors import UsageError, one_of
from spmd_engine.foreign import parse_toml, read_text, reading
from spmd_engine.formats.safetensors_file import read_json
from spmd_engine.models import GPTSize, Model, build_model, gpt
from spmd_engine.models.decoder import decoder
from spmd_engine.models.hf.read_config import read_config
from spmd_engine.models.load_config import (
    is_description,
    is_path,
    load_config,
    located,
    short_name,
    warn_unknown_fields,
)
from spmd_engine.models.lora import LoRAOptions, with_adapters
from spmd_engine.models.names import MODELS, family_of
from spmd_engine.models.user_code import is_code


def planned_model(
    name: str,
    lora: LoRAOptions | None = None,
    base: ParallelConfig = ParallelConfig(),  # noqa: B008 (immutable)
) -> Model:
    """A model by name, as training builds it for this composition, or by file.

    Files are TOML with the sizes of a GPT (layers, width, heads, context and, optionally, vocabulary, hidden, tied,
    key_value_heads), a ``config.json`` of Hugging Face or its folder, and GGUF. With ``lora`` the model is frozen and
    has adapters. Raises UsageError for unknown names, and for files with unknown or missing fields.
    """
    model, family = _read(name, base)
    return model if lora is None else with_adapters(model, lora, family)


def _read(name: str, base: ParallelConfig) -> tuple[Model, str]:
    """The model as this composition computes it, and the family of its weight names."""
    method = base.context_method or "ring"
    if is_code(name):
        return ModelConfig(name).build(base), family_of(name)
    if name in MODELS:
        return build_model(name, context_method=method, reshard_after=base.reshard_after), family_of(name)
    path = Path(name) if is_description(name) or not is_path(name) else located(name)
    if (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        shape, unknown = read_config(read_json(path), f"model {path}")
        warn_unknown_fields(str(path), unknown)
        return decoder(shape, short_name(str(path.parent.resolve())), context_method=method), shape.family
    if path.suffix == ".gguf":
        shape = load_config(path)
        return decoder(shape, path.stem, context_method=method), shape.family
    if path.suffix != ".toml":
        raise UsageError(f"unknown model {name!r}; {one_of(name, MODELS)}, or give a .toml file or a config.json")
    with reading(f"model {name}: invalid TOML"):
        content = parse_toml(read_text(name))
    size = GPTSize.from_json(content, f"model {name}")
    try:
        return gpt(size, Path(name).stem, context_method=method), "gpt2"  # a GPT's weights have the names of GPT-2
    except UsageError as error:
        raise UsageError(f"model {name}: {error}") from error
