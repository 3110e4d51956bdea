"""Models by their names on the command line, by paths, and in the local cache of Hugging Face's hub."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spmd_engine.errors import CheckpointError, UsageError, one_of
from spmd_engine.models.convnet import ImageShape, convnet, resnet
from spmd_engine.models.decoder import DECODERS, GPT_SIZES, DecoderConfig, decoder
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.mixture import Mixture
from spmd_engine.models.mlp import deep_mlp, mlp, two_layers
from spmd_engine.models.model import Model
from spmd_engine.models.user_code import is_code, name_of_code, names_in

if TYPE_CHECKING:
    from spmd_engine.tokens.hugging_face import JsonTokenizer


logger = logging.getLogger(__name__)


def is_path(name: str) -> bool:
    """Return whether a name is a path of weights: it has a slash, or is a file, a folder, or in the hub's cache."""
    return "/" in name or Path(name).exists() or snapshot_of(name) is not None


def located(name: str | Path, what: str = "model") -> Path:
    """Return the path of a model, or of another ``what`` of the hub: the file or folder of this name, or the snapshot
    in the hub's local cache. Raises CheckpointError, with the command that fetches it, if neither exists."""
    path = Path(name)
    if path.exists() or path.is_symlink():
        return path
    snapshot = snapshot_of(str(name))
    if snapshot is not None:
        return snapshot
    if not _is_hub_name(str(name)) or "/" not in str(name):
        raise CheckpointError(f"{name} is no {what}: there is no such folder")
    raise CheckpointError(
        f"{name} is no {what}: there is no such folder, and no snapshot of it in the hub's cache, "
        f"{_cache_folder(str(name))}; online, run 'hf download {name} --local-dir {path.name}', and name that folder"
    )


def snapshot_of(name: str) -> Path | None:
    """Return the folder of a model ``org/name`` in the local cache of Hugging Face's hub, with its branch main as last
    fetched; None if it is not in the cache. Nothing is fetched."""
    if not _is_hub_name(name):
        return None
    try:
        revision = (_cache_folder(name) / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = _cache_folder(name) / "snapshots" / revision
    return snapshot if revision.isalnum() and snapshot.is_dir() else None


def short_name(name: str) -> str:
    """The last part of a model's name or path; of a snapshot in the hub's cache, of the name that it has there.

    For code, it is the name of the class or function.
    """
    if is_code(name):
        return name_of_code(name)
    path = Path(name)
    folder = path.parent.parent.name
    return folder.rpartition("--")[2] if path.parent.name == "snapshots" and folder.startswith(_PREFIX) else path.name


_PREFIX = "models--"  #: the beginning of a model's folder in the hub's cache


def _is_hub_name(name: str) -> bool:
    parts = name.split("/")
    return len(parts) <= 2 and all(part.strip(".") and part.isascii() and part.isprintable() for part in parts)


def _cache_folder(name: str) -> Path:
    """Return the folder of a model in the hub's cache, by the rules of the hub's own library."""
    environment = os.environ
    home = Path(environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    cache = Path(environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    # Not Path.expanduser, which raises RuntimeError for a user without a home, as in some containers.
    return Path(os.path.expanduser(cache), f"{_PREFIX}{name.replace('/', '--')}")


def is_description(name: str) -> bool:
    """Return whether the name is that of a file that describes a model without weights."""
    return name.endswith((".toml", ".json"))


def load_config(path: str | Path, *, warn: bool = False) -> DecoderConfig:
    """Return the configuration in a folder with ``config.json``, or in a GGUF file. Raises CheckpointError.

    ``warn``: log the unknown fields of ``config.json``, which are ignored.
    """
    from spmd_engine.formats.gguf import read_gguf
    from spmd_engine.formats.safetensors_file import CONFIG, read_json
    from spmd_engine.models.gguf import config_of_gguf
    from spmd_engine.models.hf.read_config import read_config

    path = located(path)
    if path.is_file():
        return config_of_gguf(read_gguf(path), str(path))
    file = path / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{path} is no model: it has no {CONFIG}")
    shape, unknown = read_config(read_json(file), str(file))
    if warn:
        warn_unknown_fields(str(path), unknown)
    return shape


def warn_unknown_fields(where: str, fields: list[str]) -> None:
    """Log a warning with the unknown fields, if any."""
    if fields:
        logger.warning("%s: unknown fields, ignored: %s", where, ", ".join(fields))


# --- Tokenizers: their modules are imported on use, since most ranks of a training need none


def tokenizer_at(path: str | Path) -> JsonTokenizer:
    """Return the tokenizer in a model's folder, in a GGUF file, or of a ``tokenizer.json``.

    Raises UsageError if it is missing or damaged.
    """
    from spmd_engine.formats.gguf import is_gguf, read_gguf
    from spmd_engine.tokens.gguf import gguf_tokenizer
    from spmd_engine.tokens.hugging_face import read_tokenizer

    path = located(path, "tokenizer")
    return gguf_tokenizer(read_gguf(path).facts, str(path)) if is_gguf(path) else read_tokenizer(path)


def ends_at(path: str | Path) -> tuple[int, ...]:
    """Return the tokens that end a generated text, from the metadata of a GGUF file."""
    from spmd_engine.formats.gguf import read_gguf
    from spmd_engine.tokens.gguf import gguf_ends

    path = located(path)
    return gguf_ends(read_gguf(path).facts, str(path))


DENSE = {"mlp": mlp, "deep-mlp": deep_mlp, "two-layers": two_layers}
#: Models of images, and their default image shapes.
IMAGES = {
    "convnet": (convnet, ImageShape()),
    "resnet-nano": (partial(resnet, blocks=(1, 1, 1), width=16, large=False), ImageShape()),
    "resnet18": (partial(resnet, blocks=(2, 2, 2, 2)), ImageShape(224, 224, 3, 1000)),
    "resnet50": (partial(resnet, blocks=(3, 4, 6, 3), bottleneck=True), ImageShape(224, 224, 3, 1000)),
}
MODELS = (*GPT_SIZES, *DECODERS, *DENSE, *IMAGES)


def shape_named(name: str) -> DecoderConfig:
    """Return the decoder ``name``; raises UsageError for other models, and for those that no family describes."""
    if name in DECODERS:
        return DECODERS[name]
    size = GPT_SIZES.get(name)
    if size is None or size.mixture is not None or size.key_value_heads is not None:
        raise UsageError(f"{name} is of no family of other libraries; {one_of(name, FAMILIES)}")
    return size.config


def has_weights(name: str) -> bool:
    """Whether a model's name is that of weights, and neither a built-in one, nor code, nor a mere description."""
    is_other = name in MODELS or is_code(name) or is_description(name) or name.endswith(".py")
    return not is_other and is_path(name)


def family_of(name: str, shape: DecoderConfig | None = None) -> str:
    """Return the family of a decoder by name, path or shape; "gpt2" for other models, which use its names."""
    if shape is None:
        shape = load_config(name) if name not in MODELS and not is_code(name) and is_path(name) else DECODERS.get(name)
    return "gpt2" if shape is None else shape.family


def unknown_model(name: str) -> UsageError:
    """The error for a name that is neither one of ``MODELS`` nor that of weights, but perhaps of a file of code."""
    if name.endswith(".py"):
        return UsageError(
            f"--model {name}: write what makes the model, as in {name}:NAME; {one_of('', names_in(name))}"
        )
    return UsageError(
        f"unknown model {name!r}; {one_of(name, MODELS)}, the path of a folder with config.json, or "
        "FILE.py:NAME for a model of your own"
    )


def other_meaning(name: str) -> str | None:
    """Return the path of weights with the name of one of ``MODELS``, local or in the hub's cache, or None."""
    if name not in MODELS:
        return None
    from spmd_engine.formats.gguf import is_gguf
    from spmd_engine.formats.safetensors_file import CONFIG

    if is_gguf(name) or Path(name, CONFIG).is_file():
        return f"./{name}"
    return str(snapshot_of(name) or "") or None


def build_model(
    name: str,
    dropout: float = 0.0,
    context_method: str = "gather",
    sample: ImageShape | None = None,
    reshard_after: int | None = None,
    mixture: Mixture | None = None,
    shape: DecoderConfig | None = None,
    vocabulary: int | None = None,
) -> Model:
    """Return the model ``name``, for images of the shape of ``sample``, or with a ``mixture`` of experts.

    If ``name`` is the path of a decoder's weights, its configuration is read. With a ``shape`` the model is that
    decoder, and ``name``, for example the path, is only its name. ``vocabulary`` is the number of tokens of a model of
    text with random weights. ``context_method`` and ``reshard_after`` (for models of images) determine how it is
    computed: see ``decoder`` and ``convnet``. Raises UsageError for an unknown name, with the available names, and for
    options that the model does not have.
    """
    if shape is None and name not in MODELS:
        if not is_path(name):
            raise unknown_model(name)
        shape = load_config(name, warn=True)
    if reshard_after is not None and name not in IMAGES:
        raise UsageError(f"--reshard-after {reshard_after}: {name} is no model of images; choose {' or '.join(IMAGES)}")
    if vocabulary is not None and (shape is not None or name not in (*GPT_SIZES, *DECODERS)):
        why = "its weights say how many tokens it knows" if shape is not None else "it is no model of text"
        raise UsageError(f"--vocabulary {vocabulary}: {name} takes none, {why}; leave it out")
    routed = [model for model, size in (GPT_SIZES | DECODERS).items() if size.mixture]
    if mixture is not None and name not in routed:
        raise UsageError(
            f"{name} has no experts, and no options of experts; choose one of {', '.join(routed)}"
            if shape is None or shape.mixture is None
            else f"{name}: its config.json defines its experts; leave out the options of experts"
        )
    if shape is not None or name in (*GPT_SIZES, *DECODERS):
        shape = shape or (DECODERS[name] if name in DECODERS else GPT_SIZES[name].config)
        options = {"mixture": mixture, "vocabulary": vocabulary}
        shape = shape.changed(**{option: value for option, value in options.items() if value is not None})
        return decoder(shape, name, dropout, context_method)
    if dropout:
        raise UsageError(f"{name} has no dropout; leave it at 0 instead of {dropout}")
    if name in DENSE:
        return DENSE[name]()
    build, image = IMAGES[name]
    return build(sample or image, name, reshard_after=reshard_after)
