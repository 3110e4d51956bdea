"""The tokenizer of the decoder whose weights are at a path."""

from __future__ import annotations

from pathlib import Path

from spmd_engine.formats.gguf import is_gguf, read_gguf
from spmd_engine.models.shape_at import located
from spmd_engine.tokens.gguf import gguf_ends, gguf_tokenizer
from spmd_engine.tokens.hugging_face import JsonTokenizer, read_tokenizer


def tokenizer_at(path: str | Path) -> JsonTokenizer:
    """That of a model's folder, of a GGUF file, or of one ``tokenizer.json``.

    Raises UsageError for what is missing or damaged.
    """
    path = located(path, "tokenizer")
    return gguf_tokenizer(read_gguf(path).facts, str(path)) if is_gguf(path) else read_tokenizer(path)


def ends_at(path: str | Path) -> tuple[int, ...]:
    """The tokens that end what is generated, as a GGUF file says them."""
    path = located(path)
    return gguf_ends(read_gguf(path).facts, str(path))
