"""``data show`` and ``data prepare``: documents as the model sees them, and a summary by file."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from spmd_engine.cli.data import data
from spmd_engine.cli.generate import _prompts
from spmd_engine.errors import UsageError
from support.token_files import prepared

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tokens.json").read_text())
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def run(*arguments):
    return CliRunner().invoke(data, list(map(str, arguments)), catch_exceptions=False).output


def shown(*arguments):
    return [json.loads(line) for line in run("show", *arguments, "--json").splitlines()]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_that_is_refused_has_a_line_and_the_next_follows(tmp_path):
    (tmp_path / "a.txt").write_bytes("caf\xe9".encode("latin-1"))
    lines(tmp_path / "b.jsonl", [{"messages": CHAT}])
    ended = CliRunner().invoke(data, ["show", str(tmp_path)])
    assert isinstance(ended.exception, UsageError) and ended.output.count(": refused: ") == 2
    assert f"a.txt: refused: {tmp_path}/a.txt" in ended.output and "no chat template: write its format" in ended.output
    (tmp_path / "c.txt").write_text("x")
    assert run("show", tmp_path).splitlines()[2:] == [
        f"--- {tmp_path}/c.txt: text, 2 tokens, 2 of them learnt",
        "> x|<end>",
    ]


@pytest.mark.parametrize("name", GOLDEN["templates"])
def test_conversations_are_shown_with_their_tokens(tmp_path, name):
    pytest.importorskip("jinja2")
    pytest.importorskip("tokenizers")
    described = GOLDEN["templates"][name]
    for file, content in GOLDEN["folders"][described["folder"]].items():
        text = GOLDEN["tokenizers"][content] if file == "tokenizer.json" else json.dumps(content)
        (tmp_path / file).write_text(text)
    (tmp_path / "chat_template.jinja").write_text(re.sub(r"{% (end)?generation %}", "", described["template"]))
    rows = lines(tmp_path / "x.jsonl", [{"messages": messages} for messages in GOLDEN["conversations"]])
    found = shown(rows, "--model", tmp_path)
    assert [{key: each[key] for key in ("tokens", "learnt")} for each in found] == GOLDEN["chats"][name]


def test_documents_are_shown_by_kind_and_marked_without_colour(tmp_path):
    rows = [{"text": "ab\n"}, {"prompt": "2+2=", "completion": "4"}, {"text": ""}, {"text": "cd"}]
    (tmp_path / "a.txt").write_text("x")
    lines(tmp_path / "b.jsonl", rows)
    assert run("show", tmp_path, "-n", 1).splitlines() == [
        f"--- {tmp_path}/a.txt: text, 2 tokens, 2 of them learnt",
        "> x|<end>",
        f"--- {tmp_path}/b.jsonl, at byte 0: text, 4 tokens, 4 of them learnt",
        r"> a|b|\n|<end>",
        f"--- {tmp_path}/b.jsonl, at byte 17: instruction, 6 tokens, 2 of them learnt",
        "  2|+|2|=",
        "> 4|<end>",
        f"--- {tmp_path}/b.jsonl, at byte 55: empty, left out",
    ]
    assert [each["row"] for each in shown(tmp_path / "b.jsonl")] == [1, 2, 3, 4]
    (tmp_path / "large.txt").write_text("some words " * 200_000)
    (large,) = shown(tmp_path / "large.txt")
    assert len(large["tokens"]) == (1 << 20) + 1 and large["notice"] == "of its first 1,048,576 bytes"
    with pytest.raises(UsageError, match="there is nothing to read in it"):
        run("show", lines(tmp_path / "c.jsonl", []))


def test_a_token_file_is_shown_as_its_documents(tmp_path):
    rows = [{"prompt": f"{number}?", "completion": "yes"} for number in range(9)]
    prepared(str(lines(tmp_path / "x.jsonl", rows)), tmp_path / "x.tokens")
    found = shown(tmp_path / "x.tokens", "-n", 2)
    assert [each["tokens"] for each in found] == [[*b"0?yes", 256], [*b"1?yes", 256]]
    assert found[0]["learnt"] == [0, 0, 1, 1, 1, 1]


def test_prepare_prints_a_line_a_file_with_what_is_left_out(tmp_path):
    rows = [{"prompt": "a", "completion": "bc"}, {"prompt": "a", "completion": ""}, {"text": "", "prompt": ""}]
    (tmp_path / "in").mkdir()
    lines(tmp_path / "in" / "a.jsonl", [rows[0]] * 3)
    lines(tmp_path / "in" / "b.jsonl", [*rows, {"text": "more", "question": "q", "answer": "a"}])
    told = run("prepare", tmp_path / "in", "--output", tmp_path / "x.tokens").splitlines()
    assert told[:3] == [
        f"{tmp_path}/in/b.jsonl: 7 tokens of 2 documents in 4 rows, of which 5 are targets; 1 left out: without an "
        "answer; 1 left out: empty; 1 with text beside prompt, not read",
        f"{tmp_path}/in/a.jsonl: 12 tokens of 3 documents in 3 rows, of which 9 are targets",
        f"{tmp_path}/x.tokens: 19 tokens of 5 documents, 2 file(s), of which 14 are targets",
    ]
    with pytest.raises(UsageError, match=r"nothing to learn in it \(2 left out: without an answer\)"):
        prepared(str(lines(tmp_path / "y.jsonl", [rows[1]] * 2)), tmp_path / "y.tokens")


def test_columns_of_a_table_are_named(tmp_path):
    (tmp_path / "x.csv").write_text("title,body\n" + "".join(f"t{number},body {number}\n" for number in range(30)))
    told = run("prepare", tmp_path / "x.csv", "--columns", "text=body", "--output", tmp_path / "x.tokens")
    assert "30 documents" in told
    found = shown(tmp_path / "x.csv", "--columns", "prompt=title,completion=body", "-n", 1)
    assert bytes(found[0]["tokens"][:-1]) == b"t0body 0" and found[0]["learnt"] == [0, 0, *[1] * 7]


def test_prompts_of_a_file_are_texts_or_messages_with_their_tools(tmp_path):
    rows = [{"prompt": "a"}, {"messages": CHAT[:1], "tools": [{"name": "f"}]}]
    found = _prompts(["first"], str(lines(tmp_path / "x.NDJSON", rows)))
    assert json.loads(json.dumps(found)) == ["first", "a", [CHAT[:1], [{"name": "f"}]]]
