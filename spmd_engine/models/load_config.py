"""Reads the configuration of a decoder from a path or from the local cache of Hugging Face's hub."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from spmd_engine.errors import CheckpointError
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.user_code import is_code, name_of_code

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
