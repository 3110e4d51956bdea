"""How the byte-level vocabulary of a GGUF file splits a text before pairs are merged, by ``tokenizer.ggml.pre``.

Each name says what the ``tokenizer.json`` of the models says that such files are made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TextSplit:
    """Patterns, of which each takes apart what those before it left; and what else depends on that name."""

    patterns: tuple[str, ...] = ()
    is_gpt2: bool = True  #: at last by GPT-2's own pattern
    whole_words: bool = False  #: a piece that is a token is that token, whatever its merges make of it
    begins: bool = False  #: a text begins with the beginning's mark, unless the file says otherwise

    def pre_tokenizer(self, library: Any) -> Any:
        """The ``tokenizers`` library's."""
        before = library.pre_tokenizers
        pieces = [before.Split(library.Regex(pattern), "isolated") for pattern in self.patterns]
        return before.Sequence([*pieces, before.ByteLevel(add_prefix_space=False, use_regex=self.is_gpt2)])


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s|" + _REST % ""
_LARGE, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
#: Words in which small letters follow large ones: %s is what ends a word.
_BY_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}*{_SMALL}+%s|[^\r\n\p{{L}}\p{{N}}]?{_LARGE}+{_SMALL}*%s|"
_LLAMA3, _QWEN2 = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"
_TEKKEN = _BY_CASE % ("", "") + r"\p{N}|" + _REST % "/"
_GPT4O = _BY_CASE % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"\p{N}{1,3}|" + _REST % "/"
_CHINESE = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_KINDS = (
    (TextSplit(), "default gpt-2 phi-2 mpt olmo jais gigachat trillion granite-docling exaone4"),
    (TextSplit((r"\p{N}",)), "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    (TextSplit((_LLAMA3,), is_gpt2=False, whole_words=True, begins=True), "llama-bpe llama3 llama-v3 falcon3 pixtral"),
    (TextSplit((_LLAMA3,), is_gpt2=False), "smaug-bpe dbrx chatglm-bpe"),
    (TextSplit((_LLAMA3,), is_gpt2=False, whole_words=True), "glm4"),
    (TextSplit((_QWEN2,), is_gpt2=False), "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan"),
    (TextSplit((_TEKKEN,), is_gpt2=False, whole_words=True, begins=True), "tekken"),
    (TextSplit((_GPT4O,), is_gpt2=False), "gpt-4o"),
    (TextSplit(_DEEPSEEK_CODER, is_gpt2=False), "deepseek-coder"),
    (TextSplit(_DEEPSEEK_V3, is_gpt2=False), "deepseek-v3 hunyuan-dense"),
    (TextSplit(_FALCON, is_gpt2=False), "falcon"),
    (TextSplit((_SEED,), is_gpt2=False), "seed-coder"),
    (TextSplit((_BLOOM,), is_gpt2=False), "bloom poro-chat gpt3-finnish"),
)
SPLITS = {name: split for split, names in _KINDS for name in names.split()}
