"""Text as tokens and back: bytes, tokenizers of others' files, chat templates, text that is written bit by bit."""

from spmd_engine.tokens.tokenizer import ByteTokenizer, TextStream, Tokenizer

__all__ = ["ByteTokenizer", "TextStream", "Tokenizer"]
