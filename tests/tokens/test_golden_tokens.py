"""Tokens of texts and conversations are those of transformers: `tests/golden/tokens.json` has them."""

import json
import re
from pathlib import Path

import pytest

from spmd_engine.tokens.encoding import encode_chat, encode_conversation

pytest.importorskip("tokenizers")
from spmd_engine.tokens.gguf import gguf_tokenizer  # noqa: E402 (only with the library)
from spmd_engine.tokens.hugging_face import read_tokenizer  # noqa: E402 (only with the library)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tokens.json").read_text())


def write_folder(folder, name, template=None):
    for file, content in GOLDEN["folders"][name].items():
        text = GOLDEN["tokenizers"][content] if file == "tokenizer.json" else json.dumps(content)
        (folder / file).write_text(text)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("name", GOLDEN["folders"])
def test_the_manifest_is_what_transformers_does_here(tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="needs transformers, whose tokens these are")
    read = transformers.AutoTokenizer.from_pretrained(write_folder(tmp_path, name))
    assert [read(text)["input_ids"] for text in GOLDEN["texts"]] == GOLDEN["ids"][name]


@pytest.mark.parametrize("name", GOLDEN["folders"])
def test_texts_have_the_tokens_of_transformers(tmp_path, name):
    found = read_tokenizer(write_folder(tmp_path, name))
    assert found.end == GOLDEN["ends"][name]
    different = [
        (text, found.encode(text), ids)
        for text, ids in zip(GOLDEN["texts"], GOLDEN["ids"][name], strict=True)
        if found.encode(text) != ids
    ]
    assert not different


SPLIT = {"type": "Split", "pattern": {"Regex": "[a-z]+|[^a-z]+"}, "behavior": "Removed", "invert": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PREPEND = {"type": "Prepend", "prepend": "\u2581"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
#: Folders as those of GPT-4o and of older Llamas on the hub: the steps of tokenizer.json, beside the name of a class.
STEPS = {
    "gpt2": ("GPT2Tokenizer", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]}}),
    "llama 2": (
        "LlamaTokenizer",
        {"pre_tokenizer": None, "normalizer": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}},
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_text_is_split_as_the_file_says_whatever_class_is_named(tmp_path, name):
    """The file is the reference: its library, and transformers without the class (PreTrainedTokenizerFast), read so.

    AutoTokenizer of transformers 5 takes the normalizer and the pre-tokenizer of the class instead; of GPT-4o's folder
    it then makes other tokens than OpenAI's own library, which agrees with the file.
    """
    from tokenizers import Tokenizer

    write_folder(tmp_path, name)
    named, changes = STEPS[name]
    text = json.dumps(json.loads((tmp_path / "tokenizer.json").read_text()) | changes)
    (tmp_path / "tokenizer.json").write_text(text)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found, reference = read_tokenizer(tmp_path), Tokenizer.from_str(text)
    assert [found.encode(each) for each in GOLDEN["texts"]] == [reference.encode(each).ids for each in GOLDEN["texts"]]
    assert [found.encode(each) for each in GOLDEN["texts"]] != GOLDEN["ids"][name]  # what the class does


def chat_folder(folder, name):
    """A folder with a template of the manifest, as models have it: without the tags around what is learnt."""
    described = GOLDEN["templates"][name]
    plain = re.sub(r"{% (end)?generation %}", "", described["template"])
    return write_folder(folder, described["folder"], plain)


@pytest.mark.parametrize("name", GOLDEN["templates"])
def test_of_a_conversation_the_answers_with_their_ends_are_learnt(tmp_path, name):
    pytest.importorskip("jinja2")
    tokenizer = read_tokenizer(chat_folder(tmp_path, name))
    for messages, expected in zip(GOLDEN["conversations"], GOLDEN["chats"][name], strict=True):
        found = encode_conversation(tokenizer, messages)
        assert found.tokens == expected["tokens"], found.text
        assert found.learnt.tolist() == expected["learnt"], found.text


@pytest.mark.parametrize("name", GOLDEN["templates"])
def test_a_chat_reads_what_precedes_an_answer_in_training(tmp_path, name):
    """At every turn, the tokens of the prompt are the first tokens of the conversation that is learnt."""
    pytest.importorskip("jinja2")
    tokenizer = read_tokenizer(chat_folder(tmp_path, name))
    for messages in GOLDEN["conversations"]:
        trained = encode_conversation(tokenizer, messages)
        for turn in range(1, len(messages), 2):
            _, prompt = encode_chat(tokenizer, messages[:turn])
            assert trained.tokens[: len(prompt)] == prompt
            assert trained.learnt[len(prompt) - 1] == 0 and trained.learnt[len(prompt)] == 1


#: By a vocabulary of the manifest, what a GGUF file says of it besides its tokens.
GGUF = {
    "byte level": ("gpt2", {"pre": "gpt-2", "eos_token_id": 3}),
    "llama 3": ("gpt2", {"pre": "llama-bpe", "bos_token_id": 6, "eos_token_id": 10}),
    "sentence piece": ("llama", {"bos_token_id": 1, "eos_token_id": 2}),
    "phi 3": ("llama", {"bos_token_id": 1, "eos_token_id": 2, "general.name": "Phi 3 Mini"}),
}

PHI3 = ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_vocabulary_has_the_tokens_of_the_tokenizer_json(tmp_path, name):
    kind, more = GGUF[name]
    described = json.loads(GOLDEN["tokenizers"][name])
    added = {each["content"]: each for each in described["added_tokens"]}
    texts = GOLDEN["texts"]
    if name == "phi 3":  # it has no others
        others = [each for each in added if each not in PHI3]
        texts = [text for text in texts if not any(each in text for each in others)]
    vocabulary = {**described["model"]["vocab"], **{content: each["id"] for content, each in added.items()}}
    tokens = sorted(vocabulary, key=vocabulary.get)
    types = {content: 3 for content in added} | {"<unk>": 2}
    facts = {"model": kind, "tokens": tokens, "token_type": [types.get(each, 1) for each in tokens]}
    facts["merges"] = [" ".join(pair) for pair in described["model"]["merges"]]
    if kind == "llama":
        facts["token_type"] = [6 if each.startswith("<0x") else types.get(each, 1) for each in tokens]
        facts["scores"] = [-float(number) for number in range(len(tokens))]
    metadata = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in (facts | more).items()}
    (tmp_path / "tokenizer.json").write_text(GOLDEN["tokenizers"][name])
    found, expected = gguf_tokenizer(metadata), read_tokenizer(tmp_path)
    assert [found.encode(text) for text in texts] == [expected.encode(text) for text in texts]
