"""Writes a tokenizer as the metadata of a GGUF file, if the reader of these finds the same tokenizer in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.tokens.gguf import BYTE, CONTROL, NORMAL, SPLITS, UNKNOWN, UNUSED, USER_DEFINED, gguf_tokenizer
from spmd_engine.tokens.hugging_face import TOKENIZER, JsonTokenizer, tokenizers_library

#: Texts that splits and vocabularies treat differently; a written tokenizer must encode them as the given one does.
PROBES = (
    "Hello  World, it's 12345 o'clock\n\n  x=1;\tDON'T\n",
    "naïve Ünïcode Ǆ 日本語テキスト 한국어 中文。 🙂 👩‍👩‍👧 q̃",
    "def f(x):\r\n    return x**2  # ok/no\n\n\n<|x|> $1,000.50 ½ ²",
)


def facts_of_tokenizer(tokenizer: JsonTokenizer, vocabulary: int) -> dict[str, Any]:
    """The metadata ``tokenizer.*`` of a byte-level BPE or a SentencePiece BPE, for a model with so many tokens.

    Raises UsageError for other tokenizers, for one with more tokens, and if the reader of GGUF files would encode some
    texts differently.
    """
    described = json.loads(tokenizer.files[TOKENIZER])
    model = described["model"]
    is_byte_level = "ByteLevel" in json.dumps(described.get("pre_tokenizer"))
    if model.get("type") != "BPE" or not (is_byte_level or model.get("byte_fallback")):
        raise UsageError("it is neither a byte-level BPE nor a SentencePiece BPE with tokens for bytes")
    if tokenizer.vocabulary > vocabulary:
        raise UsageError(f"it has {tokenizer.vocabulary} tokens, but the model {vocabulary}")
    by_number = {number: (token, NORMAL) for token, number in model["vocab"].items()}
    for added in described.get("added_tokens", ()):
        by_number[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    rows = [by_number.get(number, (f"[PAD{number}]", UNUSED)) for number in range(vocabulary)]
    tokens, types = [token for token, _ in rows], [kind for _, kind in rows]
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    facts: dict[str, Any] = {"model": "gpt2" if is_byte_level else "llama", "tokens": tokens}
    if is_byte_level:
        facts |= {"pre": _name_of_split(tokenizer, model), "token_type": types, "merges": list(map(" ".join, merges))}
    else:
        ranks = {"".join(merge): rank for rank, merge in reversed(list(enumerate(merges)))}
        facts["scores"] = [-float(ranks.get(token, len(merges))) for token in tokens]
        facts["token_type"] = [_kind(token, kind, model) for token, kind in rows]
        facts["add_space_prefix"] = "Prepend" in json.dumps(described.get("normalizer"))
    numbers, ends = {token: number for number, token in enumerate(tokens)}, tokenizer.encode("x")
    for name, field in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        if (token := tokenizer.special.get(f"{name}_token")) in numbers:
            facts[f"{field}_token_id"] = numbers[token]
    for name, at in {"bos": 0, "eos": -1}.items():
        facts[f"add_{name}_token"] = bool(ends) and ends[at] == facts.get(f"{name}_token_id")
    result: dict[str, Any] = {f"tokenizer.ggml.{name}": value for name, value in facts.items()}
    if tokenizer.chat_template is not None:
        result["tokenizer.chat_template"] = tokenizer.chat_template
    written = gguf_tokenizer(result)
    if any(written.encode(probe) != tokenizer.encode(probe) for probe in PROBES):
        raise UsageError("a GGUF file cannot describe it: some texts would become other tokens")
    return result


def _kind(token: str, kind: int, model: Mapping[str, Any]) -> int:
    """The type of a token of SentencePiece."""
    if token == model.get("unk_token"):
        return UNKNOWN
    return BYTE if token.startswith("<0x") and len(token) == len("<0x0A>") else kind


def _name_of_split(tokenizer: JsonTokenizer, model: Mapping[str, Any]) -> str:
    """The name in GGUF files of the split that divides texts before pairs are merged as a tokenizer does."""
    library = tokenizers_library()
    given = library.Tokenizer.from_str(tokenizer.files[TOKENIZER]).pre_tokenizer
    expected = [given.pre_tokenize_str(probe) for probe in PROBES]
    for name, split in SPLITS.items():
        splitter = split.pre_tokenizer(library)
        if split.whole_words == bool(model.get("ignore_merges")) and expected == [
            splitter.pre_tokenize_str(probe) for probe in PROBES
        ]:
            return name
    raise UsageError("a GGUF file cannot describe it: it splits texts in a way that has no name there")
