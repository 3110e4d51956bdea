"""Encoding and decoding of text: bytes, tokenizers of models, chat templates, and decoding while tokens arrive."""

from spmd_engine.tokens.tokenizer import ByteTokenizer, TextStream, Tokenizer

__all__ = ["ByteTokenizer", "TextStream", "Tokenizer"]
