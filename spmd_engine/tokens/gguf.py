"""Tokenizers from the vocabulary in a GGUF file's metadata, and as such metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.foreign import reading
from spmd_engine.tokens.hugging_face import ENDS, TOKENIZER, JsonTokenizer, tokenizers_library

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # values of tokenizer.ggml.token_type

#: Special tokens of Phi-3 that leave the spaces after them. Files do not say so; llama.cpp has the same list.
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")


def gguf_tokenizer(metadata: Mapping[str, Any], where: str = "the GGUF file") -> JsonTokenizer:
    """The tokenizer that ``tokenizer.ggml.*`` describes: a byte-level BPE ("gpt2") or SentencePiece's BPE ("llama").

    Raises UsageError, naming ``where``, for other kinds, and for missing or damaged fields.
    """
    library = tokenizers_library()
    with reading(f"{where} describes no tokenizer", "; download the file again"):
        kind = metadata.get("tokenizer.ggml.model")
        is_phi3 = re.search("phi[- ]?3", str(metadata.get("general.name")).lower()) is not None
        tokens = _field(metadata, "tokens", where)
        types = list(metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens)))
        vocabulary = {token: number for number, token in enumerate(tokens)}
        if len(types) != len(tokens):
            raise UsageError(f"{where}: {len(tokens)} tokens, but {len(types)} types of them; download the file again")
        if kind == "gpt2":
            tokenizer = _byte_level(library, metadata, vocabulary, where)
        elif kind == "llama":
            tokenizer = _sentence_piece(library, metadata, tokens, vocabulary, where)
        else:
            raise UsageError(f"{where}: tokenizer.ggml.model is {kind!r}; supported are gpt2 and llama")
        for wanted in ((UNKNOWN, CONTROL), (USER_DEFINED,)):
            how: dict[str, Any] = {"special": CONTROL in wanted, "normalized": False}
            added = [token for token, kind in zip(tokens, types, strict=True) if kind in wanted]
            strips = {token: is_phi3 and token not in _PHI3_PLAIN for token in added}
            tokenizer.add_tokens([library.AddedToken(token, rstrip=strip, **how) for token, strip in strips.items()])
        fields = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
        numbers = {name: _token(metadata, field, len(tokens), where) for name, field in fields.items()}
        names = {name: tokens[number] for name, number in numbers.items() if number is not None}
        pre = metadata.get("tokenizer.ggml.pre", "default")
        usual = {"add_bos_token": kind == "llama" or SPLITS[pre].begins, "add_eos_token": False}
        return JsonTokenizer(
            tokenizer.to_str(),
            where,
            chat_template=metadata.get("tokenizer.chat_template"),
            special=names,
            around={option: bool(metadata.get(f"tokenizer.ggml.{option}", usual[option])) for option in usual},
        )


def gguf_ends(metadata: Mapping[str, Any], where: str = "the GGUF file") -> tuple[int, ...]:
    """The tokens that end a generation: those that end a text, a turn or a message by the metadata, and control tokens
    with such names. Raises UsageError for a number that is no token."""
    with reading(f"{where} describes no tokenizer", "; download the file again"):
        tokens = _field(metadata, "tokens", where)
        types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
        listed = [_token(metadata, f"{name}_token_id", len(tokens), where) for name in ("eos", "eot", "eom")]
        typed = enumerate(zip(tokens, types, strict=False))
        named = [number for number, (token, kind) in typed if token in ENDS and kind == CONTROL]
        return tuple(dict.fromkeys(number for number in (*listed, *named) if number is not None))


def _byte_level(library: Any, metadata: Mapping[str, Any], vocabulary: Mapping[str, int], where: str) -> Any:
    split = SPLITS.get(pre := metadata.get("tokenizer.ggml.pre", "default"))
    if split is None:
        raise UsageError(f"{where}: tokenizer.ggml.pre is {pre!r}; supported are {', '.join(SPLITS)}")
    merges = [tuple(pair.split(" ", 1)) for pair in _field(metadata, "merges", where)]
    with reading(f"{where}: its vocabulary cannot be read", "; download the file again"):
        tokenizer = library.Tokenizer(library.models.BPE(dict(vocabulary), merges, ignore_merges=split.whole_words))
    tokenizer.pre_tokenizer = split.pre_tokenizer(library)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _sentence_piece(
    library: Any, metadata: Mapping[str, Any], tokens: Sequence[str], vocabulary: Mapping[str, int], where: str
) -> Any:
    scores = _field(metadata, "scores", where)
    if len(scores) != len(tokens):
        raise UsageError(f"{where}: {len(tokens)} tokens, but {len(scores)} scores of them; download the file again")
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    model = library.models.BPE(
        dict(vocabulary), list(_merges(vocabulary, scores)), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = library.Tokenizer(model)
    leading = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [library.normalizers.Prepend("▁")] if leading else []
    tokenizer.normalizer = library.normalizers.Sequence([*steps, library.normalizers.Replace(" ", "▁")])
    module = library.decoders
    strip = [module.Strip(" ", 1, 0)] if leading else []
    tokenizer.decoder = module.Sequence([module.Replace("▁", " "), module.ByteFallback(), module.Fuse(), *strip])
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Every pair of tokens that join to a token, in descending order of the joined token's score."""
    pairs = []
    for token, number in vocabulary.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocabulary and right in vocabulary:
                pairs.append((-scores[number], vocabulary[left], vocabulary[right], left, right))
    return ((left, right) for *_, left, right in sorted(pairs))


def _token(metadata: Mapping[str, Any], field: str, count: int, where: str) -> int | None:
    """The number of a token in the metadata, or None."""
    number = metadata.get(f"tokenizer.ggml.{field}")
    if number is not None and not 0 <= number < count:
        raise UsageError(f"{where}: tokenizer.ggml.{field} is {number}, of {count} tokens")
    return number


def _field(metadata: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None or not hasattr(value, "__len__") or not len(value):
        raise UsageError(
            f"{where} has no tokenizer.ggml.{name}: take the run that it was exported from (--run), or the folder or "
            "file of the original model"
        )
    return value


# --- Splits of a text before pairs are merged, for byte-level vocabularies, by ``tokenizer.ggml.pre``
#
# Each split is that of the ``tokenizer.json`` from which such GGUF files are converted.


@dataclass(frozen=True)
class TextSplit:
    """Patterns that split a text one after the other, and other properties of a ``tokenizer.ggml.pre``."""

    patterns: tuple[str, ...] = ()
    is_gpt2: bool = True  #: whether GPT-2's own pattern splits the text last
    whole_words: bool = False  #: whether a piece that is a token is not merged
    begins: bool = False  #: whether a text begins with the begin token, unless the file says otherwise

    def pre_tokenizer(self, library: Any) -> Any:
        """The splits as a pre-tokenizer of the ``tokenizers`` library."""
        module = library.pre_tokenizers
        splits = [module.Split(library.Regex(pattern), "isolated") for pattern in self.patterns]
        return module.Sequence([*splits, module.ByteLevel(add_prefix_space=False, use_regex=self.is_gpt2)])


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s|" + _REST % ""
_LARGE, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
#: Words in which small letters follow large ones: %s is the end of a word.
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


# --- A tokenizer as metadata, if the reader finds the same tokenizer in them

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
