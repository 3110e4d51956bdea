"""Text as tokens and back: bytes, tokenizers of others' files, chat templates, text that is written bit by bit."""

from spmd_engine.tokens.stream import TextStream
from spmd_engine.tokens.tokenizer import ByteTokenizer, Tokenizer

__all__ = ["ByteTokenizer", "TextStream", "Tokenizer"]
