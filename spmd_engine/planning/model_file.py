"""Models to plan for that cannot be trained by name: large ones, those of a TOML file, and Hugging Face's."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType

from spmd_engine.engine.composition import Composition
from spmd_engine.errors import UsageError
from spmd_engine.foreign import parse_toml, read_text, reading
from spmd_engine.formats.huggingface import read_json
from spmd_engine.models import GPTSize, Model, build_model, gpt
from spmd_engine.models.adapters import LoRAOptions, with_adapters
from spmd_engine.models.decoder import decoder
from spmd_engine.models.huggingface_config import shape_of_config
from spmd_engine.models.names import MODELS, family_of
from spmd_engine.models.shape_at import shape_at

#: Shapes as published: GPT-2 (Radford et al., 2019) and GPT-3 (Brown et al., 2020); Megatron's of arXiv 2205.05198.
LARGE = MappingProxyType(
    {
        "gpt2-xl": GPTSize(48, 1600, 25, 1024, 50257),
        "gpt-1b": GPTSize(80, 1024, 16, 128),
        "megatron-22b": GPTSize(48, 6144, 64, 2048, 51200),
        "gpt3-175b": GPTSize(96, 12288, 96, 2048, 51200),
        "turing-530b": GPTSize(105, 20480, 128, 2048, 51200),
        "megatron-1t": GPTSize(128, 25600, 160, 2048, 51200),
    }
)
KINDS = {int: "a whole number from 1", bool: "true or false", float: "a number above 0, as 1e-5"}


def planned_model(
    name: str,
    lora: LoRAOptions | None = None,
    base: Composition = Composition(),  # noqa: B008 (immutable)
) -> Model:
    """A model by name, as training builds it for this composition; or of a TOML file of a GPT's sizes: layers, width,
    heads, context and, optionally, vocabulary, hidden, tied, key_value_heads; or of Hugging Face's ``config.json``, or
    a folder that has one; or of a GGUF file.

    With ``lora`` it is frozen, and its adapters are trained. Raises UsageError, in one line, for unknown names, and for
    files with unknown or missing fields.
    """
    model, family = _read(name, base.context_method or "ring", base.recut_after)
    return model if lora is None else with_adapters(model, lora, family)


def _read(name: str, method: str, recut_after: int | None) -> tuple[Model, str]:
    """The model, with this ``method`` of attention where sequences are cut, and the family whose names its weights
    have."""
    if name in LARGE:
        return gpt(LARGE[name], name, context_method=method), family_of(name)
    if name in MODELS:
        return build_model(name, context_method=method, recut_after=recut_after), family_of(name)
    path = Path(name)
    if path.suffix == ".json" or (path / "config.json").is_file():
        return _of_config(path if path.suffix == ".json" else path / "config.json", method)
    if path.suffix == ".gguf":
        shape = shape_at(path)
        return decoder(shape, path.stem, context_method=method), shape.family
    if path.suffix != ".toml":
        names = ", ".join((*MODELS, *LARGE))
        raise UsageError(f"unknown model {name!r}; choose one of {names}, or give a .toml file or a config.json")
    with reading(f"model {name}: no TOML"):
        content = parse_toml(read_text(name))
    size = _size(content, name)
    try:
        return gpt(size, Path(name).stem, context_method=method), "gpt2"  # whose names a GPT's weights have
    except UsageError as error:
        raise UsageError(f"model {name}: {error}") from error


def _of_config(path: Path, method: str) -> tuple[Model, str]:
    shape = shape_of_config(read_json(path), f"model {path}")
    return decoder(shape, path.resolve().parent.name, context_method=method), shape.family


def _size(content: dict, where: str) -> GPTSize:
    known = {each.name: each for each in fields(GPTSize) if each.name != "mixture"}
    if unknown := sorted(set(content) - set(known)):
        raise UsageError(f"model {where}: unknown field {unknown[0]!r}; there are: {', '.join(known)}")
    for name, each in known.items():
        if each.default is MISSING and name not in content:
            raise UsageError(f"model {where}: the field {name!r} is missing")
    for name, value in content.items():
        kind = {"tied": bool, "epsilon": float}.get(name, int)
        if type(value) is not kind or not value >= {bool: 0, int: 1, float: 1e-30}[kind]:
            raise UsageError(f"model {where}: {name} is {value!r}: it must be {KINDS[kind]}")
    return GPTSize(**content)
