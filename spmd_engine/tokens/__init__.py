"""Text as tokens and back: bytes, tokenizers in files of models, chat templates, and decoding while tokens arrive."""

from spmd_engine.tokens.tokenizer import ByteTokenizer, TextStream, Tokenizer

__all__ = ["ByteTokenizer", "TextStream", "Tokenizer"]
