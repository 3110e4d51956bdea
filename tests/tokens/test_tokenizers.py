"""Tokenizers of others' files, and chat templates."""

import json
from pathlib import Path

import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints.hf.export import export_huggingface
from spmd_engine.checkpoints.hf.weights import Pretrained
from spmd_engine.errors import UsageError
from spmd_engine.models.names import tokenizer_at
from spmd_engine.tokens import ByteTokenizer, TextStream
from spmd_engine.tokens.encoding import _process, chat_text
from spmd_engine.training.data.prepare import prepare
from support.altered import gguf_of

library = pytest.importorskip("tokenizers")
from spmd_engine.tokens.gguf import (  # noqa: E402 (only with the library)
    SPLITS,  # noqa: E402
    gguf_ends,
    gguf_tokenizer,
)
from spmd_engine.tokens.hugging_face import read_tokenizer, tokenizers_library  # noqa: E402

TEXT = "Hello world, naïve 数字 🙂 1234\n  end"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A byte-level BPE as GPT-2 has it, of a few merges, in a folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT * 3, "the cat sat on the mat " * 9], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    return folder


#: The library ends the whole process at it.
CUT_WITHIN_A_CHARACTER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "model": {
            "type": "BPE",
            "continuing_subword_prefix": "#",
            "vocab": {"a": 0, "é": 1, "aé": 2},
            "merges": [["a", "é"]],
        },
    }
)


def test_a_text_comes_back(byte_level):
    tokenizer = read_tokenizer(byte_level)
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT and max(tokens) < tokenizer.vocabulary == 300
    assert tokenizer.end == tokenizer.separator == 0
    assert tokenizer.encode_all([TEXT, "the"]) == [tokens, tokenizer.encode("the")]
    assert tokenizer.decode([*tokens, tokenizer.end]) == TEXT
    assert tokenizer.encode("a\udcff") == tokenizer.encode("a\ufffd")  # a byte that was no text


def test_a_stream_gives_the_text_of_all_tokens(byte_level):
    tokenizer = read_tokenizer(byte_level)
    stream = TextStream(tokenizer)
    pieces = [stream.feed(token) for token in tokenizer.encode(TEXT)]
    assert "".join(pieces) + stream.finish() == TEXT and not any("\ufffd" in piece for piece in pieces)


def test_what_belongs_around_a_text(byte_level, tmp_path):
    """Said beside the file it holds, in the place of what the file says, and is handed on."""
    (tmp_path / "tokenizer.json").write_text((byte_level / "tokenizer.json").read_text())
    plain = read_tokenizer(byte_level).encode("the")
    config = {"bos_token": "<|end|>", "eos_token": "<|end|>", "add_bos_token": True, "add_eos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_tokenizer(tmp_path)
    assert found.encode("the") == [0, *plain] and found.encode("the", special=False) == plain
    for name, text in found.files.items():
        (tmp_path / name).write_text(text)
    assert read_tokenizer(tmp_path).encode("the") == [0, *plain]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    assert read_tokenizer(tmp_path).encode("the") == plain


def test_its_files_describe_an_equal_tokenizer(byte_level, tmp_path):
    tokenizer = read_tokenizer(byte_level)
    for name, text in tokenizer.files.items():
        (tmp_path / name).write_text(text)
    again = read_tokenizer(tmp_path)
    assert (again.sha256, again.end, again.encode(TEXT)) == (tokenizer.sha256, 0, tokenizer.encode(TEXT))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "describes no tokenizer"),
        ("tokenizer.json", '{"model": {"type": "none"}}', "describes no tokenizer"),
        ("tokenizer.json", CUT_WITHIN_A_CHARACTER, "'é', which a merge adds to a word, does not begin with '#'"),
        ("tokenizer.json", b"\xff", "cannot be read"),
        ("tokenizer_config.json", "[]", "must hold an object"),
        ("tokenizer_config.json", '{"eos_token": "<gone>"}', "has no token '<gone>', which ends a text"),
    ],
)
def test_damaged_files_are_errors(byte_level, tmp_path, name, content, message):
    for file in byte_level.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message):
        read_tokenizer(tmp_path)


def test_gpt2_s_two_files_are_the_same_tokenizer(byte_level, tmp_path):
    """As older folders have them, and as transformers reads them: with what belongs before every text."""
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|end|>", "eos_token": "<|end|>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    library.Tokenizer.from_file(str(byte_level / "tokenizer.json")).model.save(str(tmp_path))
    tokenizer, expected = read_tokenizer(tmp_path), read_tokenizer(byte_level)
    text = TEXT + " the<|end|>cat"
    assert tokenizer.encode(text) == [0, *expected.encode(text)] and tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b c\n")
    with pytest.raises(UsageError, match="vocab.json and merges.txt make no tokenizer"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "CodeGenTokenizer"}))
    with pytest.raises(UsageError, match="vocab.json is there instead: AutoTokenizer.from_pretrained"):
        read_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="no such file; a model's folder has its tokenizer there"):
        read_tokenizer(tmp_path)


# --- GGUF


def metadata_of(folder):
    """What a GGUF file would say of this tokenizer."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == "<|end|>" else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": vocabulary["<|end|>"],
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def test_a_gguf_vocabulary_encodes_as_the_original(byte_level):
    original, found = read_tokenizer(byte_level), gguf_tokenizer(metadata_of(byte_level))
    for text in (TEXT, "the cat<|end|>sat", "  two  spaces"):
        assert found.encode(text) == original.encode(text)
    assert found.decode(found.encode(TEXT)) == TEXT and found.end == original.end and found.chat_template


def test_one_in_a_gguf_file_encodes_a_corpus(byte_level, tmp_path):
    facts = metadata_of(byte_level)
    (tmp_path / "model.gguf").write_bytes(gguf_of(facts))
    (tmp_path / "text").write_text(TEXT)
    with Mesh() as mesh:
        found = tokenizer_at(tmp_path / "model.gguf")
        file = prepare(mesh.group(), [str(tmp_path / "text")], found, str(tmp_path / "tokens"))
    assert found.encode(TEXT) == gguf_tokenizer(facts).encode(TEXT)
    assert file.facts.tokenizer_sha256 == tokenizer_at(tmp_path / "model.gguf").sha256


def test_one_in_a_gguf_file_goes_along_with_an_export(byte_level, tmp_path, caplog):
    facts, arrays = metadata_of(byte_level), Pretrained(Path(__file__).parents[1] / "golden" / "decoders" / "llama")
    (tmp_path / "model.gguf").write_bytes(gguf_of(facts))
    export_huggingface(arrays, arrays.shape, tmp_path / "out", beside=tmp_path / "model.gguf")
    found = read_tokenizer(tmp_path / "out")
    assert found.encode(TEXT) == gguf_tokenizer(facts).encode(TEXT) and found.chat_template
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == facts["tokenizer.ggml.eos_token_id"] and "pad_token_id" not in config

    (tmp_path / "model.gguf").write_bytes(gguf_of(facts | {"tokenizer.ggml.eot_token_id": 7}))
    export_huggingface(arrays, arrays.shape, tmp_path / "turns", beside=tmp_path / "model.gguf")
    config = json.loads((tmp_path / "turns" / "config.json").read_text())
    assert config["eos_token_id"] == [facts["tokenizer.ggml.eos_token_id"], 7]

    (tmp_path / "model.gguf").write_bytes(gguf_of(facts | {"tokenizer.ggml.pre": "odd"}))
    export_huggingface(arrays, arrays.shape, tmp_path / "without", beside=tmp_path / "model.gguf")
    assert "its tokenizer is not handed on" in caplog.text and not (tmp_path / "without" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'ll", " be", " 12345", " HiThere", "!?", "\n"]),
        ("smollm", ["It", "'ll", " be", " ", "1", "2", "3", "4", "5", " HiThere", "!?", "\n"]),
        ("qwen2", ["It", "'ll", " be", " ", "1", "2", "3", "4", "5", " HiThere", "!?\n"]),
        ("llama-bpe", ["It", "'ll", " be", " ", "123", "45", " HiThere", "!?\n"]),
        ("tekken", ["It", "'ll", " be", " ", "1", "2", "3", "4", "5", " Hi", "There", "!?\n"]),
        ("gpt-4o", ["It'll", " be", " ", "123", "45", " Hi", "There", "!?\n"]),
        ("deepseek-coder", ["It", "'", "ll", " be", " ", "1", "2", "3", "4", "5", " HiThere", "!?", "\n"]),
        ("deepseek-v3", ["It", "'ll", " be", " ", "123", "45", " HiThere", "!?\n"]),
        ("falcon", ["It", "'", "ll", " be", " ", "123", "45", " HiThere", "!?", "\n"]),
        ("glm4", ["It", "'ll", " be", " ", "123", "45", " HiThere", "!?\n"]),
        ("seed-coder", ["It", "'ll", " be", " ", "1", "2", "3", "4", "5", " HiThere", "!?", "\n"]),
        ("bloom", ["It'll", " be", " 12345", " HiThere", "!?\n"]),
    ],
)
def test_a_gguf_vocabulary_splits_a_text_as_its_model(pre, pieces):
    text = "It'll be 12345 HiThere!?\n"
    found = SPLITS[pre].pre_tokenizer(tokenizers_library()).pre_tokenize_str(text)
    assert [text[slice(*span)] for _, span in found] == pieces


def test_a_word_of_a_llama_3_is_its_own_token_whatever_is_merged_and_its_texts_have_a_beginning():
    tokens = ["a", "b", "c", "bc", "abc", "<s>", "</s>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3, 3],
        "tokenizer.ggml.merges": ["b c"],
        "tokenizer.ggml.bos_token_id": 5,
        "tokenizer.ggml.eos_token_id": 6,
    }
    for pre, around, wanted in (
        ("llama-bpe", {}, [5, 4]),
        ("gpt-2", {}, [0, 3]),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, [4]),
        ("gpt-2", {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [5, 0, 3, 6]),
    ):
        assert gguf_tokenizer(metadata | around | {"tokenizer.ggml.pre": pre}).encode("abc") == wanted


def test_a_gguf_file_s_texts_end_with_more_than_one_token(byte_level):
    metadata = metadata_of(byte_level)
    end = metadata["tokenizer.ggml.eos_token_id"]
    assert gguf_ends(metadata) == (end,)  # which is called so, too
    more = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7}
    assert gguf_ends(metadata | more) == (5, 7, end)
    ordinary = {"tokenizer.ggml.token_type": [1] * len(metadata["tokenizer.ggml.tokens"])}
    assert gguf_ends(metadata | more | ordinary) == (5, 7)
    with pytest.raises(UsageError, match="eot_token_id is 900, of 300 tokens"):
        gguf_ends(metadata | {"tokenizer.ggml.eot_token_id": 900})


def test_sentence_piece_s_pairs_are_merged_by_score():
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "c", "ab", "bc", "▁ab", "abc"]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0]
    types = [2, 3, 3, *[6] * 256, *[1] * 8]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = gguf_tokenizer(metadata)
    pieces = [tokens[token] for token in tokenizer.encode("abc ab é")]
    assert pieces == ["<s>", "▁", "abc", "▁ab", "▁", "<0xC3>", "<0xA9>"]  # bc before ab, by its score
    assert tokenizer.decode(tokenizer.encode("abc ab é")) == "abc ab é"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; supported are gpt2 and llama"),
        ({"tokenizer.ggml.pre": "odd"}, "tokenizer.ggml.pre is 'odd'"),
        ({"tokenizer.ggml.tokens": []}, "has no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "300 tokens, but 1 types of them"),
        ({"tokenizer.ggml.eos_token_id": 400}, "eos_token_id is 400, of 300 tokens"),
        ({"tokenizer.ggml.merges": ["x y"]}, "its vocabulary cannot be read"),
    ],
)
def test_damaged_vocabularies_are_errors(byte_level, changed, message):
    with pytest.raises(UsageError, match=message):
        gguf_tokenizer(metadata_of(byte_level) | changed)


def test_a_configuration_of_the_end_token_keeps_the_begin_token_of_the_file(byte_level, tmp_path):
    text = json.loads((byte_level / "tokenizer.json").read_text())
    text["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}},
                                                 {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    config = {"bos_token": "<|end|>", "eos_token": "!", "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_tokenizer(tmp_path)
    assert found.encode("x") == [0, *found.encode("x", special=False), *found.encode("!", special=False)]


# --- chat

TEMPLATE = """{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + message.role) }}{% endif %}
    {{- '<' + message.role + '>' + message.content | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


FOR, END = "{% for i in range(99999) %}", "{% endfor %}"


class Chatty(ByteTokenizer):
    special = {"eos_token": "|"}

    def __init__(self, chat_template):
        self.chat_template = chat_template


def test_a_conversation_is_written_by_the_template():
    pytest.importorskip("jinja2")
    messages = [{"role": "user", "content": " Hello "}]
    assert chat_text(Chatty(TEMPLATE), messages) == "<user>Hello|<assistant>"
    messages += [{"role": "assistant", "content": "Hi"}]
    assert chat_text(Chatty(TEMPLATE), messages, answer=False) == "<user>Hello|<assistant>Hi|"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "x!"),  # what an assistant says
        ("{{ 'with' if tools is not none or documents is not none else 'without' }}", "without"),
        ("{{ messages | tojson(indent=None, separators=(',', ':')) }}", '[{"role":"user","content":"x"}]'),
    ],
)
def test_templates_find_what_transformers_gives_them(template, expected):
    pytest.importorskip("jinja2")
    assert chat_text(Chatty(template), [{"role": "user", "content": "x"}]) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "this model has no chat template"),
        (TEMPLATE, "no role system"),
        ("{% if", "the chat template cannot write this conversation"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "cannot write"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% break %}", "'break' outside loop"),
        ("{{ cycler() }}", "at least one item has to be provided"),
        ("{{ 1 | wordwrap(0) }}", "has no attribute 'splitlines'"),
        ("{{ 'a' * 10 ** 11 }}", "it needs more than .* bytes of memory"),
        ("{{ 'a' | center(10 ** 11) }}", "it needs more than"),
        ("{{ '%100000000000d' | format(1) }}", "it needs more than"),
        (
            # 32 times as long each time, so that little memory is filled before it does not suffice
            "{% set n = namespace(s='ab') %}" + FOR + "{% set n.s = n.s" + 31 * " ~ n.s" + " %}" + END,
            "it needs more",
        ),
        ("{{ 'a' * 2 ** 25 }}", "it has more than 16,777,216 characters"),
        (f"{FOR}{FOR}{FOR}{END}{END}{END}", "it computes for more than 0.2 s"),
        ("{% macro twice() %}" + FOR * 3 + END * 3 + "{% endmacro %}{{ twice() | length }}", "it computes for more"),
        ("{{ 10 ** (10 ** 10) }}", "it computes for more than 0.2 s"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("(" * 9 + "{{" + "(" * 50_000, "cannot write"),
    ],
    ids=range(19),
)
def test_templates_that_cannot_be(template, message, monkeypatch):
    pytest.importorskip("jinja2")
    # To fill a process's memory takes seconds on a busy machine: only one of the two limits is near in each case.
    monkeypatch.setattr("spmd_engine.tokens.encoding.SECONDS", 0.2 if "computes" in message else 60)
    with pytest.raises(UsageError, match=message) as caught:
        chat_text(Chatty(template), [{"role": "system", "content": "x"}])
    assert "\n" not in str(caught.value)


def test_no_template_runs_in_a_sandbox_that_it_can_leave(monkeypatch):
    pytest.importorskip("jinja2")
    for version, error in ("3.1.5", "could run any code with jinja2 3.1.5"), ("3.2.0a1", None), ("10.0", None):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        _process.cache_clear()
        if error is None:
            assert chat_text(Chatty("x"), []) == "x"
        else:
            with pytest.raises(UsageError, match=error):
                chat_text(Chatty("x"), [])


def test_threads_share_the_process_that_writes_conversations():
    pytest.importorskip("jinja2")
    found = run_threads(
        lambda: [chat_text(Chatty("{{ messages }}" * number), [{}] * number) for number in range(1, 6)], 3
    )
    assert found == [[str([{}] * number) * number for number in range(1, 6)]] * 3


def test_a_conversation_that_is_no_json_is_refused():
    pytest.importorskip("jinja2")
    with pytest.raises(UsageError, match="cannot write this conversation"):
        chat_text(Chatty("x"), [{"content": object()}])
