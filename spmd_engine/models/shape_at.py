"""The decoder whose weights are at a path, by its configuration alone."""

from __future__ import annotations

from pathlib import Path

from spmd_engine.errors import CheckpointError
from spmd_engine.models.decoder import DecoderShape


def is_path(name: str) -> bool:
    """Whether a model's name is that of a file or a folder: it has a slash, or something is there."""
    return "/" in name or Path(name).exists()


def shape_at(path: str | Path) -> DecoderShape:
    """What is there: a folder with ``config.json``, or a GGUF file. Raises CheckpointError."""
    from spmd_engine.formats.gguf import read_gguf
    from spmd_engine.formats.huggingface import CONFIG, read_json
    from spmd_engine.models.gguf_shape import shape_of_gguf
    from spmd_engine.models.huggingface_config import shape_of_config

    path = Path(path)
    if path.is_file():
        return shape_of_gguf(read_gguf(path), str(path))
    if not (path / CONFIG).is_file():
        what = "there is no such folder" if not path.exists() else f"it has no {CONFIG}"
        raise CheckpointError(f"{path} is no model: {what}")
    return shape_of_config(read_json(path / CONFIG), str(path / CONFIG))


def not_understood(path: str | Path) -> list[str]:
    """Fields of what describes the decoder there, of which nothing is known: it is computed as if they were not."""
    from spmd_engine.formats.huggingface import CONFIG, read_json
    from spmd_engine.models.huggingface_config import read_config

    path = Path(path, CONFIG)
    return read_config(read_json(path), str(path))[1] if path.is_file() else []
