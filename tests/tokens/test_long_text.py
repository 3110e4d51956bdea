"""A long text has the tokens in parts that it has as a whole."""

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from spmd_engine.tokens import ByteTokenizer

library = pytest.importorskip("tokenizers")
from spmd_engine.tokens import hugging_face  # noqa: E402
from spmd_engine.tokens.gguf import SPLITS  # noqa: E402 (only with the library)
from spmd_engine.tokens.hugging_face import JsonTokenizer  # noqa: E402

TEXT = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_level(pre_tokenizer, **options):
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = pre_tokenizer
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False, **options)
    made.train_from_iterator([TEXT], trainer)
    return made


def one_word():
    """As Llama 2's: spaces are characters, and a text is split nowhere before its characters are merged."""
    made = library.Tokenizer(library.models.BPE(unk_token="<unk>"))
    steps = [library.normalizers.Prepend(SPACE), library.normalizers.Replace(" ", SPACE)]
    made.normalizer = library.normalizers.Sequence(steps)
    made.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(f"{SPACE}+[^{SPACE}]*"), "isolated")
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = library.trainers.BpeTrainer(vocab_size=800, special_tokens=special, show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    described = json.loads(made.to_str())
    described["model"] |= {"byte_fallback": True, "fuse_unk": True}
    described["added_tokens"] = described["added_tokens"][:1]
    return library.Tokenizer.from_str(json.dumps(described | {"pre_tokenizer": None}))


def unigram():
    made = library.Tokenizer(library.models.Unigram())
    made.normalizer, made.pre_tokenizer = library.normalizers.NFKC(), library.pre_tokenizers.Metaspace()
    options = {"unk_token": "<unk>", "special_tokens": ["<unk>"], "show_progress": False}
    made.train_from_iterator([TEXT], library.trainers.UnigramTrainer(vocab_size=400, **options))
    return made


def word_piece():
    made = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = library.normalizers.BertNormalizer()
    made.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    trainer = library.trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]"], show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    return made


def trimmed():
    """Offsets without spaces, and a token that the text itself names."""
    made = byte_level(library.pre_tokenizers.ByteLevel(add_prefix_space=True), special_tokens=["<|end|>"])
    made.post_processor = library.processors.ByteLevel(trim_offsets=True)
    return made


KINDS = {
    "gpt2": lambda: byte_level(library.pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama 3": lambda: byte_level(SPLITS["llama-bpe"].pre_tokenizer(library)),
    "deepseek": lambda: byte_level(SPLITS["deepseek-v3"].pre_tokenizer(library)),
    "trimmed": trimmed,
    "one word": one_word,
    "unigram": unigram,
    "word piece": word_piece,
}


@cache
def tokenizer_of(kind):
    return JsonTokenizer(KINDS[kind]().to_str())


def odd_text(rng, size, pieces=12):
    """Words, and what splits differently by where it begins: long runs of spaces, lines, digits, letters."""
    found = []
    while sum(map(len, found)) < size:
        begin, n = rng.randrange(len(TEXT) - 400), rng.randrange(1, 400)
        found += (
            TEXT[begin : begin + n],
            (
                *[""] * 4,
                " " * n,
                "\n" * (n // 4),
                " \t\r\n" * (n // 8),
                "".join(rng.choices("0123456789", k=n)),
                "\u65e5\u672c\u8a9e\u3001" * (n // 9),
                "\U0001f600\U0001f469\u200d\U0001f467" * (n // 20),
                "<|end|>" * (n // 200),
                "a" * 2 * n,
            )[rng.randrange(pieces)],
        )
    return "".join(found)


def in_parts(rng, content):
    """Bytes in chunks of any size, also in the middle of characters."""
    at = 0
    while at < len(content):
        size = rng.randrange(1, 2000)
        yield content[at : at + size]
        at += size


@pytest.fixture
def windows(monkeypatch):
    """Small windows; how many characters were encoded at once, and how many borders were looked for and found."""
    seen = {"sizes": [], "borders": []}
    encoded, border = hugging_face._encoded, hugging_face._border
    monkeypatch.setattr(hugging_face, "WINDOW", 3000)
    monkeypatch.setattr(hugging_face, "SHARED", 800)
    monkeypatch.setattr(
        hugging_face,
        "_encoded",
        lambda inner, some: seen["sizes"].extend(len(text) for _, text in some) or encoded(inner, some),
    )
    monkeypatch.setattr(
        hugging_face, "_border", lambda *windows: seen["borders"].append(found := border(*windows)) or found
    )
    return seen


def assert_the_same(tokenizer, rng, content):
    parts = list(tokenizer.encode_long(in_parts(rng, content)))
    (whole,) = tokenizer.encode_all([content.decode(errors="surrogateescape")])
    assert np.concatenate([np.zeros(0, int), *parts]).tolist() == whole
    return len(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_the_tokens_of_the_whole(windows, kind):
    rng = random.Random(7)
    content = bytearray(odd_text(rng, 25_000).encode())
    for _ in range(9):  # no characters, some of them
        content[rng.randrange(len(content))] = rng.randrange(256)
    assert assert_the_same(tokenizer_of(kind), rng, bytes(content)) > 2
    assert any(windows["borders"])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_many_texts_have_the_tokens_of_the_whole(windows, kind, seed):
    rng = random.Random(seed)
    for _ in range(6):
        assert_the_same(tokenizer_of(kind), rng, odd_text(rng, 40_000).encode())


@pytest.mark.parametrize("kind", ["gpt2", "llama 3", "one word"])
def test_of_plain_text_no_more_than_a_window_is_encoded_at_once(windows, kind):
    rng = random.Random(1)
    content = odd_text(rng, 40_000, pieces=4).encode()
    assert_the_same(tokenizer_of(kind), rng, content)
    assert all(windows["borders"]) and len(windows["borders"]) > 9
    assert max(windows["sizes"][:-1]) <= 3000 + 800  # the last one is the whole


def test_a_word_without_an_end_is_encoded_as_one_without_square_work(windows):
    rng = random.Random(2)
    content = "".join(rng.choices("acgt", k=60_000)).encode()
    assert assert_the_same(tokenizer_of("gpt2"), rng, content) == 1
    assert sum(windows["sizes"]) < 6 * len(content)


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
@pytest.mark.parametrize("content", [b"", b"a", b"\xff", b"a b " * 1000])
def test_short_texts_are_long_texts_too(windows, kind, content):
    tokenizer = ByteTokenizer() if kind == "bytes" else tokenizer_of(kind)
    assert_the_same(tokenizer, random.Random(3), content)
