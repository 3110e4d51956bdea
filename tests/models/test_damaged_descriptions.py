"""Damaged config.json and tokenizer.json, at random: each is read, or refused by an error that names the file."""

import json
from pathlib import Path

import pytest

from damaged_json import with_other_bytes, with_other_values
from spmd_engine.errors import UsageError
from spmd_engine.models.decoder import decoder
from spmd_engine.models.shape_at import shape_at
from spmd_engine.tokens.hugging_face import read_tokenizer

FOLDERS = Path(__file__).parents[1] / "golden" / "decoders"
FAMILIES = sorted(path.name for path in FOLDERS.iterdir())
TEXT = "Hello world, naïve 数字 🙂 1234\n  end"
few_or_many = pytest.mark.parametrize("count", [8, pytest.param(1000, marks=pytest.mark.soak)])


@few_or_many
@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_configs(family, count, tmp_path):
    content = json.loads((FOLDERS / family / "config.json").read_text())
    values = (json.dumps(each).encode() for each in with_other_values(content, 1, count))
    for spoilt in (*values, *with_other_bytes(content, 2, count // 4)):
        (tmp_path / "config.json").write_bytes(spoilt)
        try:
            decoder(shape_at(tmp_path))
        except UsageError as error:
            assert "config.json" in str(error), spoilt


@pytest.mark.parametrize("name, value", [("rope_parameters", 5), ("rope_scaling", [1]), ("layer_types", 7)], ids=str)
def test_a_field_of_another_kind_is_named(name, value, tmp_path):
    content = json.loads((FOLDERS / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {name: value}))
    with pytest.raises(UsageError, match=rf"config.json: {name} is .*: it must be an? (object|list)"):
        shape_at(tmp_path)


@pytest.fixture(scope="module")
def tokenizer():
    """What describes a byte-level BPE of a few merges."""
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer, made.decoder = library.pre_tokenizers.ByteLevel(), library.decoders.ByteLevel()
    made.post_processor = library.processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    letters = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=letters, special_tokens=["<|end|>"], show_progress=False
    )
    made.train_from_iterator([TEXT * 3], trainer)
    return json.loads(made.to_str())


@few_or_many
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_tokenizers(file, count, tokenizer, tmp_path):
    config = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|end|>", "add_bos_token": True, "chat_template": "x"}
    contents = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    around = _without_lists_of_tokens(contents[file])
    changed = [{**contents[file], **each} for each in with_other_values(around, 1, count)]
    values = (json.dumps(each).encode() for each in (*changed, *with_other_values(contents[file], 2, count)))
    for spoilt in (*values, *with_other_bytes(contents[file], 3, count)):
        (tmp_path / file).write_bytes(spoilt)
        try:
            read = read_tokenizer(tmp_path)
        except UsageError as error:
            assert "tokenizer" in str(error), spoilt
        else:
            tokens = read.encode(TEXT)
            read.decode([*tokens, 0, 299, 10**6])


def _without_lists_of_tokens(content):
    """The rest is small, and so more often hit."""
    return {name: each for name, each in content.items() if name != "model"}
