"""Tokenizers of Hugging Face's models, with the ``tokenizers`` library (extra ``[hf]``)."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.foreign import json_at, parse_json, read_text, reading
from spmd_engine.importing import library
from spmd_engine.tokens.tokenizer import BROKEN, Tokenizer

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SPECIAL = "special_tokens_map.json"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  #: a space in vocabularies of SentencePiece
#: Names of tokens that end a turn or a text; the files of many models do not say so.
ENDS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
))  # fmt: skip
#: Fields of tokenizer_config.json that enable a token before or after every text, and the names of these tokens.
AROUND = {"add_bos_token": "bos_token", "add_eos_token": "eos_token"}


class JsonTokenizer(Tokenizer):
    """The tokenizer that a ``tokenizer.json`` describes."""

    def __init__(
        self,
        text: str,
        where: str = "tokenizer.json",
        *,
        chat_template: str | None = None,
        special: Mapping[str, str] | None = None,
        around: Mapping[str, bool] | None = None,
        usual: Mapping[str, str | int] | None = None,
    ) -> None:
        """``special`` are special tokens by name: ``eos_token`` is that after a text. ``usual`` are those, as texts or
        numbers, that count if ``special`` has none of the name and the vocabulary has them. ``around`` has
        ``add_bos_token`` and ``add_eos_token``, if they differ from the file. Raises UsageError, naming ``where``, for
        a text that describes no tokenizer.
        """
        with reading(f"{where} describes no tokenizer", "; download the file again"):
            tokenizers = tokenizers_library()
            _check_merges(parse_json(text))
            self._inner = tokenizers.Tokenizer.from_str(text)
            self._inner.no_padding()
            self._inner.no_truncation()
            self.vocabulary = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            self.sha256 = sha256(text.encode()).hexdigest()
            self.chat_template, self.special = chat_template, dict(special or {})
            for name, token in (usual or {}).items():
                named = self._inner.id_to_token(token) if isinstance(token, int) else token
                if named is not None and self._inner.token_to_id(named) is not None:
                    self.special.setdefault(name, named)
            added = {token.content for token in self._inner.get_added_tokens_decoder().values()}
            known = {text for text in self.special.values() if self._inner.token_to_id(text) is not None}
            self._inner.add_special_tokens(sorted(known - added))  # then no text is split into parts of one
            end = self.special.get("eos_token")
            self.separator = self.end = self._inner.token_to_id(end) if end is not None else None
            if around:
                self._set_around(around)
            self._mark()
            config = {**self.special, **(around or {}), **({"chat_template": chat_template} if chat_template else {})}
            self.files = {TOKENIZER: text, CONFIG: json.dumps(config)}
            if chat_template is not None and not isinstance(chat_template, str):
                raise UsageError(f"{where}: chat_template is {chat_template!r:.40}: it must be a text")
            if not self.vocabulary:
                raise UsageError(f"{where} describes a tokenizer without any tokens; download the file again")
            if end is not None and self.end is None:
                raise UsageError(f"{where} has no token {end!r}, which ends a text; download the files again")

    def _set_around(self, around: Mapping[str, bool]) -> None:
        """Add tokens before and after every text, as in the configuration or, without an entry, as in the file."""
        around_text, by_file = [], self._inner.encode("").ids
        for (name, token), at in zip(AROUND.items(), (0, -1), strict=True):
            text = self.special.get(token)
            number = self._inner.token_to_id(text) if text is not None else None
            wanted = around[name] if name in around else bool(by_file) and by_file[at] == number
            around_text.append([(text, number)] if wanted and number is not None else [])
        before, after = around_text
        single = " ".join([*(text for text, _ in before), "$A", *(text for text, _ in after)])
        self._inner.post_processor = tokenizers_library().processors.TemplateProcessing(
            single=single, special_tokens=list(dict.fromkeys(before + after))
        )

    def _mark(self) -> None:
        """Find which tokens stand around every text, and which are special."""
        encoding = self._inner.encode("a")
        own = [number for number, added in enumerate(encoding.special_tokens_mask) if not added]
        first, last = (own[0], own[-1] + 1) if own else (len(encoding.ids), len(encoding.ids))
        self.before, self.after = encoding.ids[:first], encoding.ids[last:]
        added = self._inner.get_added_tokens_decoder().items()
        template = self.chat_template if isinstance(self.chat_template, str) else ""
        self.turn_ends = [number for number, token in added if token.content in ENDS and token.content in template]
        self._special = frozenset([*(number for number, token in added if token.special), self.end])

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return self._inner.encode(_plain(text), add_special_tokens=special).ids

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._inner.encode(_plain(text), add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def piece(self, token: int) -> str:
        named = self._inner.id_to_token(token) or f"<{token}>"
        text = self._inner.decode([token], skip_special_tokens=False)
        if BROKEN in text and all(letter in _BYTES for letter in named):
            return "".join(f"<0x{_BYTES[letter]:02X}>" for letter in named)
        return named if not text or BROKEN in text or SPACE in named else text

    def is_special(self, token: int) -> bool:
        return token in self._special

    def decode(self, tokens: Iterable[int]) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=True)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            item.ids for item in self._inner.encode_batch([_plain(text) for text in texts], add_special_tokens=False)
        ]

    def encode_long(self, chunks: Iterable[bytes]) -> Iterator[np.ndarray]:
        return encode_long(self._inner, codecs.iterdecode(chunks, "utf-8", "replace"))


_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
#: The bytes of the letters of byte-level vocabularies: a byte that is printed is its own letter (as in GPT-2's code).
_BYTES = {
    chr(letter): byte
    for letter, byte in zip(
        [*_PRINTED, *range(256, 324)], [*_PRINTED, *sorted({*range(256)} - {*_PRINTED})], strict=True
    )
}


def _check_merges(described: Any) -> None:
    """Raise ValueError for merges that make the library abort the process: it removes the prefix of continued words
    from the second part of every merge without a check, even in the middle of a character."""
    model = described.get("model") if isinstance(described, Mapping) else None
    if not isinstance(model, Mapping):
        return
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        second = parts[1] if isinstance(parts, list) and len(parts) == 2 else None
        if isinstance(second, str) and not second.startswith(prefix):
            raise ValueError(f"{second!r}, which a merge adds to a word, does not begin with {prefix!r}")


def _plain(text: str) -> str:
    """The text with a replacement mark for each byte that is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="surrogateescape").decode(errors="replace")
    return text


def tokenizers_library() -> Any:
    """The ``tokenizers`` library, imported on first use. Raises UsageError if it is not installed."""
    return library("tokenizers", "a tokenizer.json needs the tokenizers library", "hf")


def read_tokenizer(path: str | Path) -> JsonTokenizer:
    """The tokenizer of a model's folder or of a ``tokenizer.json``, with ``tokenizer_config.json`` and
    ``chat_template.jinja`` of the same folder. Without a ``tokenizer.json``, GPT-2's class is read from ``vocab.json``
    and ``merges.txt``. Raises UsageError for files that are missing or damaged.

    Special tokens are those of ``tokenizer_config.json`` and ``special_tokens_map.json``; then those that transformers'
    class has by default, and the end tokens of ``generation_config.json`` and ``config.json``.
    """
    path = Path(path)
    file = path / TOKENIZER if path.is_dir() else path
    texts = {name: _text(file.with_name(name)) for name in (CONFIG, TEMPLATE) if file.with_name(name).is_file()}
    config = _config(texts, str(file))
    if "added_tokens_decoder" not in config:  # then transformers reads the older file, too
        named = _object(file.with_name(SPECIAL)).items()
        config = {**config, **{name: value for name, value in named if name.endswith("_token") and _content(value)}}
        texts[CONFIG] = json.dumps(config)
    described = {name: _object(file.with_name(name)) for name in ("generation_config.json", "config.json")}
    kind = config.get("tokenizer_class") or CLASSES.get(str(described["config.json"].get("model_type")))
    kind = str(kind).removesuffix("Fast")  # the class of transformers that reads it
    usual = _usual(kind, config, described.values())
    if file.is_file():
        return tokenizer_of(texts | {TOKENIZER: _text(file)}, str(file), usual)
    parts = [file.with_name(name) for name in (VOCABULARY, MERGES)]
    if kind != "GPT2Tokenizer" or not all(part.is_file() for part in parts):
        raise UsageError(f"{file}: no such file; a model's folder has its tokenizer there{remedy(file.parent)}")
    named = {**{name: text for name, text in usual.items() if isinstance(text, str)}, **config}
    text = byte_level_json(_text(parts[0]), _text(parts[1]), named, tokenizers_library(), str(file.parent))
    return tokenizer_of(texts | {TOKENIZER: text}, str(file.parent), usual)


def tokenizer_of(files: Mapping[str, str], where: str, usual: Mapping[str, str | int] | None = None) -> JsonTokenizer:
    """The tokenizer of ``files``, texts by name; for ``usual`` see ``JsonTokenizer``. Raises UsageError, naming
    ``where``, if they are damaged."""
    config = _config(files, where)
    with reading(f"{where}: {CONFIG} beside it cannot be read", "; download the file again"):
        chat = files.get(TEMPLATE, config.get("chat_template"))
        if isinstance(chat, list):  # several templates by name
            named = {entry.get("name"): entry.get("template") for entry in chat if isinstance(entry, Mapping)}
            chat = named.get("default") or next(iter(named.values()), None)
    special = {name: text for name, value in config.items() if name.endswith("_token") and (text := _content(value))}
    around = {name: config[name] for name in AROUND if isinstance(config.get(name), bool)}
    return JsonTokenizer(files[TOKENIZER], where, chat_template=chat, special=special, around=around, usual=usual)


def _usual(kind: str, config: Mapping[str, Any], described: Iterable[Mapping[str, Any]]) -> dict[str, str | int]:
    """The special tokens of a class that ``config`` does not name; the model's configurations in ``described`` may name
    the end token, too."""
    usual: dict[str, str | int] = {name: text for name, text in USUAL.get(kind, {}).items() if name not in config}
    for content in described:
        ends = content.get("eos_token_id")
        number = ends[0] if isinstance(ends, list) and ends else ends
        if type(number) is int and number >= 0:
            usual.setdefault("eos_token", number)
    return usual


def _object(file: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty if there is none."""
    content = None
    with suppress(UsageError):
        content = json_at(file) if file.is_file() else None
    return content if isinstance(content, Mapping) else {}


def _config(files: Mapping[str, str], where: str) -> Mapping[str, Any]:
    with reading(f"{where}: {CONFIG} beside it cannot be read", "; download the file again"):
        config = parse_json(files.get(CONFIG, "{}"))
        if not isinstance(config, Mapping):
            raise ValueError("it must hold an object, {...}")
        return config


def _content(value: Any) -> str:
    """The text of a token, which may be described by an object."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""


def _text(file: Path) -> str:
    with reading(f"{file} cannot be read", "; download the file again"):
        return read_text(file)


# --- Older tokenizers of GPT-2's class: ``vocab.json`` and ``merges.txt``, without a tokenizer.json


VOCABULARY, MERGES = "vocab.json", "merges.txt"
#: Classes of transformers by the ``model_type`` of a folder that does not name one.
CLASSES = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "phi", "starcoder2", "codegen"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt", "olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
}


def _named(begin: str | None, end: str, unknown: str) -> Mapping[str, str]:
    return {"eos_token": end, "unk_token": unknown} | ({"bos_token": begin} if begin else {})


_END = "<|endoftext|>"
#: By class, the special tokens that a folder need not name.
USUAL: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("GPT2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer"), _named(_END, _END, _END)),
    "Qwen2Tokenizer": _named(None, _END, _END),
    **dict.fromkeys(("LlamaTokenizer", "CodeLlamaTokenizer"), _named("<s>", "</s>", "<unk>")),
    "GemmaTokenizer": _named("<bos>", "<eos>", "<unk>"),
    "CohereTokenizer": _named("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<UNK>"),
}


def byte_level_json(vocabulary: str, merges: str, config: Mapping[str, Any], library: Any, where: str) -> str:
    """The ``tokenizer.json`` that is equivalent to the two files and ``tokenizer_config.json``; ``library`` is
    ``tokenizers``. Raises UsageError, naming ``where``, for damaged files."""
    with reading(f"{where}: {VOCABULARY} and {MERGES} make no tokenizer", "; download them again"):
        pairs = [tuple(line.split(" ")) for line in merges.splitlines() if line and not line.startswith("#version")]
        tokenizer = library.Tokenizer(library.models.BPE(parse_json(vocabulary), pairs))
    spaced = bool(config.get("add_prefix_space"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.post_processor = library.processors.ByteLevel(trim_offsets=False)
    named = (_content(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token"))
    texts = dict.fromkeys(text for text in named if text and tokenizer.token_to_id(text) is not None)
    tokenizer.add_special_tokens([library.AddedToken(text, special=True) for text in texts])
    return tokenizer.to_str()


def remedy(folder: Path) -> str:
    """A hint for a folder with a tokenizer of another format; empty if there is none."""
    for name in ("tokenizer.model", "spiece.model", "vocab.txt", VOCABULARY):
        if (folder / name).is_file():
            return (
                f"; {name} is there instead: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of "
                "transformers writes the other"
            )
    return ""


# --- Encoding of a long text in bounded memory
#
# The tokens are the same as when the text is encoded at once.
#
# The text is encoded in overlapping windows. Two neighbours are joined at a border in their overlap: no token on one
# side of it depends on text of the other side. There are two kinds of borders:
#
# - between words, if the tokenizer splits a text into words. Its patterns match from left to right, so after a border
#   they find the same words wherever the text begins. Both windows must have the border, with ``ALIKE`` equal tokens on
#   both sides, because the end of a window can change its last words, and its beginning the first ones;
# - between tokens, if a whole text is one word to the tokenizer: the two characters at the border are neighbours in no
#   token of the vocabulary, so no merge can cross it.
#
# If there is no border (a word is longer than the overlap), the two windows are encoded as one.


WINDOW = 1 << 17  #: characters of a window
SHARED = 1 << 12  #: characters that two neighbouring windows share
TOGETHER = 8  #: windows that the library encodes in parallel
ALIKE = 16  #: tokens on each side of a border that both windows must have
_SAMPLE = "Some words, and 1234 numbers.\n\nA line;\t\u65e5\u672c."

#: Whether no token can hold the end of the first token and the beginning of the second.
Separates = Callable[[int, int], bool]


@dataclass(frozen=True)
class _Encoded:
    begin: int  #: in characters of the whole text
    text: str
    ids: np.ndarray
    places: np.ndarray  #: the first character of each token, in the whole text
    words: np.ndarray  #: the number of each token's word within the window


def encode_long(inner: Any, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the tokens of a text in pieces; ``inner`` is a tokenizer of the ``tokenizers`` library."""
    separates = _separates(inner)
    windows = _windows(inner, texts)
    left, first = next(windows, None), 0  # a window, and its first token that is not yet returned
    for right in windows:
        assert left is not None
        if border := _border(left, right, separates):
            yield left.ids[first : border[0]]
            left, first = right, border[1]
            continue
        # At least double the text: adding one window at a time to a word of n characters takes n^2 steps.
        more = islice(windows, len(left.text) // WINDOW)
        text = "".join([left.text, *(window.text[SHARED:] for window in (right, *more))])
        left = _encoded(inner, [(left.begin, text)])[0]
    if left is not None:
        yield left.ids[first:]


def _windows(inner: Any, texts: Iterable[str]) -> Iterator[_Encoded]:
    windows = _overlapping(texts)
    while batch := list(islice(windows, TOGETHER)):
        yield from _encoded(inner, batch)


def _overlapping(texts: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Overlapping windows of the text, each with the place where it begins."""
    begin, held = 0, ""
    for text in texts:
        held += text
        while len(held) > WINDOW + SHARED:  # the last window is at least as long as its overlap
            yield begin, held[:WINDOW]
            begin, held = begin + WINDOW - SHARED, held[WINDOW - SHARED :]
    if held:
        yield begin, held


def _encoded(inner: Any, texts: Sequence[tuple[int, str]]) -> list[_Encoded]:
    windows = []
    encodings = inner.encode_batch([text for _, text in texts], add_special_tokens=False)
    for (begin, text), encoding in zip(texts, encodings, strict=True):
        places = np.array([place for place, _ in encoding.offsets], np.int64) + begin
        words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
        windows.append(_Encoded(begin, text, np.array(encoding.ids, np.uint32), places, words))
    return windows


def _border(left: _Encoded, right: _Encoded, separates: Separates) -> tuple[int, int] | None:
    """The indices, in both windows, of the first token after a border; None if there is no border."""
    for middle in (right.begin + SHARED * part // 4 for part in (2, 1, 3)):
        i, j = (int(np.searchsorted(window.places, middle)) for window in (left, right))
        # i and j are the same token; the border is the first place after it where both windows agree.
        count = min(len(left.ids) - i, len(right.ids) - j) - ALIKE
        before = min(i, j, ALIKE)
        if before < ALIKE or count < 1:
            continue
        ours, theirs = (slice(at - ALIKE, at + count + ALIKE) for at in (i, j))
        same = (left.ids[ours] == right.ids[theirs]) & (left.places[ours] == right.places[theirs])
        agreed = np.convolve(same, np.ones(2 * ALIKE, np.int64), "valid") == 2 * ALIKE
        for k in np.flatnonzero(agreed[:count]).tolist():
            borders = all(window.words[at + k - 1] != window.words[at + k] for window, at in ((left, i), (right, j)))
            if borders or separates(int(left.ids[i + k - 1]), int(left.ids[i + k])):
                return i + k, j + k
    return None


def _separates(inner: Any) -> Separates:
    model = inner.model
    marks = ("continuing_subword_prefix", "end_of_word_suffix")  # they change a token's characters
    if (
        _splits(inner)
        or type(model).__name__ not in ("BPE", "Unigram")
        or any(getattr(model, mark, None) for mark in marks)
    ):
        return lambda before, behind: False
    pairs: set[str] = set()
    for token in inner.get_vocab(with_added_tokens=False):
        pairs.update(map(str.__add__, token, token[1:]))

    def separates(before: int, behind: int) -> bool:
        return inner.id_to_token(before)[-1:] + inner.id_to_token(behind)[:1] not in pairs

    return separates


def _splits(inner: Any) -> bool:
    """Whether this tokenizer splits a text into words."""
    if inner.pre_tokenizer is None:
        return False
    sample = inner.normalizer.normalize_str(_SAMPLE) if inner.normalizer else _SAMPLE
    return len(inner.pre_tokenizer.pre_tokenize_str(sample)) > 1
