"""What stands before and after a text, and which tokens of an instruction are learnt."""

import json
from pathlib import Path

import numpy as np
import pytest

from spmd_engine.errors import UsageError
from spmd_engine.formats.text_documents import Document
from spmd_engine.tokens import ByteTokenizer, Tokenizer
from spmd_engine.tokens.encoding import (
    REWRITTEN,
    encode_chat,
    encode_conversation,
    encode_pair,
    encode_prompt,
    encode_text,
)
from spmd_engine.training.data import prepare

pytest.importorskip("tokenizers")
from spmd_engine.tokens.hugging_face import read_tokenizer  # noqa: E402 (only with the library)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tokens.json").read_text())
BEGIN, END = 1, 2


def tokenizer_in(folder, name, template=None):
    for file, content in GOLDEN["folders"][name].items():
        text = GOLDEN["tokenizers"][content] if file == "tokenizer.json" else json.dumps(content)
        (folder / file).write_text(text)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return read_tokenizer(folder)


@pytest.mark.parametrize("name", ["any sentence piece", "any that ends"])
def test_a_pair_has_the_tokens_of_its_text_and_one_end(tmp_path, name):
    """Encoded apart, the completion would begin with a second space, and the prompt could end the text."""
    tokenizer = tokenizer_in(tmp_path, name)
    found = encode_pair(tokenizer, "add the default", " value")
    whole = tokenizer.encode("add the default value", special=False)
    assert found.tokens == [BEGIN, *whole, END]
    prompt = encode_prompt(tokenizer, "add the default")
    assert prompt == found.tokens[: len(prompt)] and END not in prompt
    assert found.learnt.tolist() == [0] * len(prompt) + [1] * (len(whole) + 2 - len(prompt))


def test_a_token_across_the_border_is_learnt(tmp_path):
    tokenizer = tokenizer_in(tmp_path, "gpt2")
    whole = encode_pair(tokenizer, "the mo", "del")
    (border,) = [at for at, (begin, end) in enumerate(tokenizer.encode_places("the model")[1]) if begin < 6 < end]
    assert whole.learnt.tolist() == [int(at >= border) for at in range(len(whole.tokens))]


def test_a_text_has_one_beginning_and_one_end(tmp_path):
    tokenizer = tokenizer_in(tmp_path, "any that ends")
    for text in ("a", "<s>a", "a</s>", "<s>a</s>"):
        tokens = encode_text(tokenizer, text).tokens
        assert (tokens[0], tokens.count(BEGIN), tokens[-1], tokens.count(END)) == (BEGIN, 1, END, 1)
        assert encode_prompt(tokenizer, text).count(BEGIN) == 1
    assert encode_text(ByteTokenizer(), "a").tokens == [97, 256] and encode_prompt(ByteTokenizer(), "a") == [97]


def test_documents_of_gpt2_s_published_folder_end(tmp_path):
    tokenizer = tokenizer_in(tmp_path, "gpt2 as published")
    assert encode_text(tokenizer, "the").tokens == [*tokenizer.encode("the"), 3]


@pytest.mark.parametrize("name", ["any that ends", "gpt2", "bert"])
def test_long_and_short_texts_have_the_same_tokens(tmp_path, monkeypatch, name):
    tokenizer = tokenizer_in(tmp_path, name)
    texts = [Document(text * 9) for text in ("words and spaces, ", "<s>the ", "a</s>")]
    expected = [encode_text(tokenizer, each.text).tokens for each in texts]
    for together in (1, 1 << 20):
        monkeypatch.setattr(prepare, "TOGETHER", together)
        found = [np.concatenate([tokens for tokens, _ in parts]) for _, parts in prepare._encoded(texts, tokenizer)]
        assert [each.tolist() for each in found] == expected


CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<think>x</think>Hi"},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "No"},
]
HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
#: As Qwen 3's: what the last answer was reasoned by is written, that of earlier ones is not.
FORGETS = HEAD + "{{ m.content if loop.last else m.content.split('</think>')[-1] }}" + TAIL


def test_earlier_answers_may_be_written_in_another_way(tmp_path):
    pytest.importorskip("jinja2")
    tokenizer = tokenizer_in(
        tmp_path, "qwen2", HEAD + "{{ '~' if loop.last and m.role == 'assistant' }}{{ m.content }}" + TAIL
    )
    found = encode_conversation(tokenizer, CHAT)
    learnt = tokenizer.decode(np.array(found.tokens)[found.learnt > 0])
    assert learnt == "<think>x</think>Hi~No" and found.notice == REWRITTEN
    _, prompt = encode_chat(tokenizer, CHAT[:3])
    assert found.tokens[: len(prompt)] == prompt
    with pytest.raises(UsageError, match="the chat template changes earlier messages"):
        encode_conversation(tokenizer_in(tmp_path, "qwen2", FORGETS), CHAT)


def test_the_end_of_a_conversation_may_follow_its_last_answer_alone(tmp_path):
    """As in Phi 3's template: the text ends with a token of its own, unless it continues."""
    pytest.importorskip("jinja2")
    end = "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}</s>{% endif %}"
    template = f"{HEAD}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}{end}"
    tokenizer = tokenizer_in(tmp_path, "qwen2", template)
    found = encode_conversation(tokenizer, [{**each, "content": each["content"][-2:]} for each in CHAT])
    learnt = [tokenizer.piece(token) for token, counts in zip(found.tokens, found.learnt) if counts]
    assert "".join(learnt) == "Hi<|im_end|>No<|im_end|>\n</s>" and not found.notice


def test_tools_are_written_and_unwritten_ones_are_said(tmp_path):
    pytest.importorskip("jinja2")
    document = Document(messages=CHAT[:2], tools=[{"name": "add"}])
    notes = []
    for template in (HEAD + "{{ m.content }}" + TAIL, "{{ tools | tojson }}" + HEAD + "{{ m.content }}" + TAIL):
        tokenizer = tokenizer_in(tmp_path, "qwen2", template)
        ((counted, parts),) = prepare._encoded([document], tokenizer)
        notes.append((counted.notice, '[{"name": "add"}]' in tokenizer.decode(parts[0][0])))
    assert notes == [("tools, which the chat template does not write", False), ("", True)]


def test_what_ends_an_answer_in_training_ends_it_in_a_chat(tmp_path):
    pytest.importorskip("jinja2")
    tokenizer = tokenizer_in(tmp_path, "qwen2 by default", HEAD + "{{ m.content }}" + TAIL)
    found = encode_conversation(tokenizer, CHAT[:2])
    (ended,) = [token for token, counts in zip(found.tokens, found.learnt) if counts and tokenizer.is_special(token)]
    assert ended != tokenizer.end and tokenizer.turn_ends == [ended]


def test_a_tokenizer_of_the_user_s_own_encodes_instructions_if_its_pieces_are_the_text():
    class Letters(Tokenizer):
        vocabulary = 256

        def encode(self, text, *, special=True):
            return [ord(each) for each in text]

        def decode(self, tokens):
            return "".join(map(chr, tokens))

    assert encode_text(Letters(), "ab").tokens == [97, 98] and Letters().piece(97) == "a"
    pair = encode_pair(Letters(), "ab", "c")
    assert (pair.tokens, pair.learnt.tolist()) == ([97, 98, 99], [0, 0, 1])
    Letters.decode = lambda self, tokens: "".join(map(chr, tokens)).upper()
    with pytest.raises(UsageError, match="Letters has no encode_places"):
        encode_pair(Letters(), "a", "b")
