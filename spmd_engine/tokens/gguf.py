"""The vocabulary in a GGUF file's metadata, as the tokenizer that it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.foreign import reading
from spmd_engine.tokens.gguf_splits import SPLITS
from spmd_engine.tokens.hugging_face import JsonTokenizer, tokenizers_library

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
#: What chat models call the end of a turn or of a text: of many files no fact says so.
_ENDS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
))  # fmt: skip


def gguf_tokenizer(metadata: Mapping[str, Any], where: str = "the GGUF file") -> JsonTokenizer:
    """The tokenizer that ``tokenizer.ggml.*`` describes: a byte-level BPE ("gpt2") or SentencePiece's BPE ("llama").

    Raises UsageError, naming ``where``, for other kinds, and for what is missing or damaged.
    """
    library = tokenizers_library()
    with reading(f"{where} describes no tokenizer", "; get the file anew"):
        kind = metadata.get("tokenizer.ggml.model")
        tokens = _field(metadata, "tokens", where)
        types = list(metadata.get("tokenizer.ggml.token_type", [1] * len(tokens)))
        vocabulary = {token: number for number, token in enumerate(tokens)}
        if len(types) != len(tokens):
            raise UsageError(f"{where}: {len(tokens)} tokens, but {len(types)} types of them; get the file anew")
        if kind == "gpt2":
            tokenizer = _byte_level(library, metadata, vocabulary, where)
        elif kind == "llama":
            tokenizer = _sentence_piece(library, metadata, tokens, vocabulary, where)
        else:
            raise UsageError(f"{where}: tokenizer.ggml.model is {kind!r}; known are gpt2 and llama")
        for special in (True, False):
            wanted = CONTROL if special else USER_DEFINED
            added = [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]
            tokenizer.add_tokens([library.AddedToken(token, special=special, normalized=False) for token in added])
        names = {}
        for name, field in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("pad_token", "padding_token_id"),
        ):
            number = _token(metadata, field, len(tokens), where)
            if number is not None:
                names[name] = tokens[number]
        pre = metadata.get("tokenizer.ggml.pre", "default")
        around = {"add_bos_token": kind == "llama" or SPLITS[pre].begins, "add_eos_token": False}
        for each in around:
            around[each] = bool(metadata.get(f"tokenizer.ggml.{each}", around[each]))
        return JsonTokenizer(
            tokenizer.to_str(),
            where,
            end=names.get("eos_token"),
            chat_template=metadata.get("tokenizer.chat_template"),
            special=names,
            around=around,
        )


def gguf_ends(metadata: Mapping[str, Any], where: str = "the GGUF file") -> tuple[int, ...]:
    """The tokens that end what is generated: those that facts say end a text, a turn or a message, and control tokens
    that are called so. Raises UsageError for a number that is none of a token."""
    with reading(f"{where} describes no tokenizer", "; get the file anew"):
        tokens = _field(metadata, "tokens", where)
        types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
        said = [_token(metadata, f"{name}_token_id", len(tokens), where) for name in ("eos", "eot", "eom")]
        both = enumerate(zip(tokens, types, strict=False))
        called = [number for number, (token, kind) in both if token in _ENDS and kind == CONTROL]
        return tuple(dict.fromkeys(number for number in (*said, *called) if number is not None))


def _byte_level(library: Any, metadata: Mapping[str, Any], vocabulary: Mapping[str, int], where: str) -> Any:
    split = SPLITS.get(pre := metadata.get("tokenizer.ggml.pre", "default"))
    if split is None:
        raise UsageError(f"{where}: tokenizer.ggml.pre is {pre!r}; known are {', '.join(SPLITS)}")
    merges = [tuple(pair.split(" ", 1)) for pair in _field(metadata, "merges", where)]
    with reading(f"{where}: its vocabulary cannot be read", "; get the file anew"):
        tokenizer = library.Tokenizer(library.models.BPE(dict(vocabulary), merges, ignore_merges=split.whole_words))
    tokenizer.pre_tokenizer = split.pre_tokenizer(library)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _sentence_piece(
    library: Any, metadata: Mapping[str, Any], tokens: Sequence[str], vocabulary: Mapping[str, int], where: str
) -> Any:
    scores = _field(metadata, "scores", where)
    if len(scores) != len(tokens):
        raise UsageError(f"{where}: {len(tokens)} tokens, but {len(scores)} scores of them; get the file anew")
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    model = library.models.BPE(
        dict(vocabulary), list(_merges(vocabulary, scores)), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = library.Tokenizer(model)
    leading = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [library.normalizers.Prepend("▁")] if leading else []
    tokenizer.normalizer = library.normalizers.Sequence([*steps, library.normalizers.Replace(" ", "▁")])
    after = library.decoders
    stripped = [after.Strip(" ", 1, 0)] if leading else []
    tokenizer.decoder = after.Sequence([after.Replace("▁", " "), after.ByteFallback(), after.Fuse(), *stripped])
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Every pair of tokens whose join is a token, the joins with the highest scores first."""
    pairs = []
    for token, number in vocabulary.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocabulary and right in vocabulary:
                pairs.append((-scores[number], vocabulary[left], vocabulary[right], left, right))
    return ((left, right) for *_, left, right in sorted(pairs))


def _token(metadata: Mapping[str, Any], field: str, count: int, where: str) -> int | None:
    """The number of a token that the file says, if it does."""
    number = metadata.get(f"tokenizer.ggml.{field}")
    if number is not None and not 0 <= number < count:
        raise UsageError(f"{where}: tokenizer.ggml.{field} is {number}, of {count} tokens")
    return number


def _field(metadata: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, Sequence) and not hasattr(found, "__len__") or not len(found):
        raise UsageError(f"{where} has no tokenizer.ggml.{name}; give the tokenizer of the original model")
    return found
