"""The configuration of a decoder at a path, or in the local cache of Hugging Face's hub."""

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
    """Whether a model's name is a path of weights: it has a slash, or is a file, a folder, or in the hub's cache."""
    return "/" in name or Path(name).exists() or snapshot_of(name) is not None


def located(name: str | Path, what: str = "model") -> Path:
    """Where a model, or ``what`` else the hub keeps, is: the file or folder of this name, else the hub's snapshot of
    this name in its local cache. Raises CheckpointError, which says how to fetch it, if neither is there."""
    path = Path(name)
    if path.exists() or path.is_symlink():
        return path
    snapshot = snapshot_of(str(name))
    if snapshot is not None:
        return snapshot
    if not _is_hub_name(str(name)) or "/" not in str(name):
        raise CheckpointError(f"{name} is no {what}: there is no such folder")
    raise CheckpointError(
        f"{name} is no {what}: there is no such folder, and no snapshot of it in the hub's cache, {_kept(str(name))}; "
        f"fetch it where there is a network, 'hf download {name} --local-dir {path.name}', and name that folder"
    )


def snapshot_of(name: str) -> Path | None:
    """The folder of a model, as ``org/name``, in the local cache of Hugging Face's hub, as its branch main was when it
    was fetched; None if it is not there. Nothing is fetched."""
    if not _is_hub_name(name):
        return None
    try:
        revision = (_kept(name) / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = _kept(name) / "snapshots" / revision
    return snapshot if revision.isalnum() and snapshot.is_dir() else None


def short_name(name: str) -> str:
    """The last part of a model's name or path; of a snapshot in the hub's cache, of the name that it has there.

    For code, it is the name of the class or function.
    """
    if is_code(name):
        return name_of_code(name)
    path = Path(name)
    kept = path.parent.parent.name
    return kept.rpartition("--")[2] if path.parent.name == "snapshots" and kept.startswith(_KEPT) else path.name


_KEPT = "models--"  #: begins the folder of a model in the hub's cache


def _is_hub_name(name: str) -> bool:
    parts = name.split("/")
    return len(parts) <= 2 and all(part.strip(".") and part.isascii() and part.isprintable() for part in parts)


def _kept(name: str) -> Path:
    """The folder of a model in the hub's cache, which is where the hub's own library looks."""
    environment = os.environ
    home = Path(environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    cache = Path(environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    return cache.expanduser() / f"{_KEPT}{name.replace('/', '--')}"


def is_description(name: str) -> bool:
    """Whether the name is that of a file that describes a model and has no weights."""
    return name.endswith((".toml", ".json"))


def load_config(path: str | Path, *, warn: bool = False) -> DecoderConfig:
    """The configuration of a folder with ``config.json``, or of a GGUF file. Raises CheckpointError.

    ``warn``: log which fields of ``config.json`` are unknown, and ignored.
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
    """Log which fields are unknown."""
    if fields:
        logger.warning("%s: unknown fields, ignored: %s", where, ", ".join(fields))


# --- tokenizers: their modules are imported by those that read one, not by every rank that trains


def tokenizer_at(path: str | Path) -> JsonTokenizer:
    """The tokenizer of a model's folder, of a GGUF file, or of one ``tokenizer.json``.

    Raises UsageError for what is missing or damaged.
    """
    from spmd_engine.formats.gguf import is_gguf, read_gguf
    from spmd_engine.tokens.gguf import gguf_tokenizer
    from spmd_engine.tokens.hugging_face import read_tokenizer

    path = located(path, "tokenizer")
    return gguf_tokenizer(read_gguf(path).facts, str(path)) if is_gguf(path) else read_tokenizer(path)


def ends_at(path: str | Path) -> tuple[int, ...]:
    """The tokens that end a generated text, from the metadata of a GGUF file."""
    from spmd_engine.formats.gguf import read_gguf
    from spmd_engine.tokens.gguf import gguf_ends

    path = located(path)
    return gguf_ends(read_gguf(path).facts, str(path))
