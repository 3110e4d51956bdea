"""Tokens of texts and conversations are those of transformers: `tests/golden/tokens.json` has them."""

import json
import re
from pathlib import Path

import pytest

from spmd_engine.tokens.encoding import encode_chat, encode_conversation

pytest.importorskip("tokenizers")
from spmd_engine.tokens.hugging_face import read_tokenizer  # noqa: E402 (only with the library)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tokens.json").read_text())


def write_folder(folder, name, template=None):
    for file, content in GOLDEN["folders"][name].items():
        text = GOLDEN["tokenizers"][content] if file == "tokenizer.json" else json.dumps(content)
        (folder / file).write_text(text)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


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
