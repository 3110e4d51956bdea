"""One reader for text: what a file says is what is read, or one line says why not."""

import codecs
import gzip
import json
import random
from importlib.util import find_spec

import pytest

from spmd_engine.errors import UsageError
from spmd_engine.formats.text_documents import (
    count_documents,
    documents,
    documents_among,
    find_files,
    format_name,
    parse_columns,
    prompts_in,
)

needs_pyarrow = pytest.mark.skipif(not find_spec("pyarrow"), reason="needs pyarrow, of the extra [data]")

ROWS = [
    {"text": "a first text"},
    {"text": "zwei \u2028 \x85 \x1c Zeilen,\nund drei"},
    {"text": "\u6570\u5b57 \U0001f642"},
]
TEXTS = [row["text"] for row in ROWS]


def read(path, columns=None, large=1 << 60):
    return list(documents(find_files([str(path)]), 0, 1 << 60, large, columns))


def texts_of(path, columns=None):
    return [b"".join(each.chunks()).decode() for each in read(path, columns)]


def write(folder, name, content):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / name


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def table(rows, separator=","):
    cells = ['"' + row["text"].replace('"', '""') + '"' for row in rows]
    return "".join(f"{number}{separator}{cell}\n" for number, cell in enumerate(cells))


ENDINGS = {
    ".jsonl": lines(ROWS),
    ".JSONL": lines(ROWS),
    ".ndjson": lines(ROWS),
    ".jsonlines": lines(ROWS).replace("\n", "\r\n").replace(",\r\n", ",\n"),
    ".json": json.dumps(ROWS, indent=1),
    ".lines.json": lines(ROWS),
    ".csv": "id,text\n" + table(ROWS),
    ".semicolon.CSV": "id;text\r\n" + table(ROWS, ";"),
    ".tsv": "id\ttext\n" + table(ROWS, "\t"),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("recoded", ["plain", "mark", "utf-16", "gz"])
def test_rows_are_read_by_the_ending_in_any_encoding(tmp_path, ending, recoded):
    content = ENDINGS[ending].encode()
    if recoded == "gz":
        ending, content = f"{ending}.GZ", gzip.compress(content)
    elif recoded == "mark":
        content = codecs.BOM_UTF8 + content
    elif recoded == "utf-16":
        content = content.decode().encode("utf-16")
    assert texts_of(write(tmp_path, f"x{ending}", content)) == TEXTS


@needs_pyarrow
def test_a_parquet_table_is_read_by_its_columns_alone(tmp_path):
    from pyarrow import parquet, table

    made = table({"id": [1, 2, 3], "text": TEXTS, "image": [b"\0" * 99] * 3})
    parquet.write_table(made, tmp_path / "x.parquet")
    assert texts_of(tmp_path / "x.parquet") == TEXTS
    assert [each.unread for each in read(tmp_path / "x.parquet")] == [("id", "image"), (), ()]
    many = table({"text": [*TEXTS * 500, None, "", "last"]})
    parquet.write_table(many, tmp_path / "many.parquet")
    found = read(tmp_path / "many.parquet")
    assert [each.text for each in found] == [*TEXTS * 500, "", "", "last"]
    assert [each.left_out for each in found[-3:]] == ["empty", "empty", ""]
    assert found[-1].where == f"{tmp_path / 'many.parquet'}, row 1503"
    parquet.write_table(made.rename_columns(["id", "article", "image"]), tmp_path / "y.parquet")
    assert texts_of(tmp_path / "y.parquet", {"text": "article"}) == TEXTS
    with pytest.raises(UsageError, match=r"y\.parquet: a document is .*it has id, article, image: name what to read"):
        read(tmp_path / "y.parquet")
    damaged = (tmp_path / "x.parquet").read_bytes()
    with pytest.raises(UsageError, match=r"z\.parquet cannot be read"):
        read(write(tmp_path, "z.parquet", damaged[: len(damaged) // 2]))


@needs_pyarrow
def test_zstd_is_unpacked_and_a_truncated_file_is_refused(tmp_path):
    from pyarrow import compress

    packed = compress(lines(ROWS).encode(), "zstd", asbytes=True)
    assert texts_of(write(tmp_path, "x.jsonl.zst", packed)) == TEXTS
    assert texts_of(write(tmp_path, "x.txt.zst", packed)) == [lines(ROWS)]
    with pytest.raises(UsageError, match=r"y\.jsonl\.zst cannot be read"):
        read(write(tmp_path, "y.jsonl.zst", packed[:-9]))
    for name in ("z.txt.ZST", "z.parquet", "z.csv.gz"):
        with pytest.raises(UsageError, match=rf"{name} is empty, and no \.\w+ file"):
            read(write(tmp_path, name, ""))


def test_a_truncated_gzip_file_is_refused(tmp_path):
    packed = gzip.compress(lines(ROWS * 100).encode())
    with pytest.raises(UsageError, match=r"x\.jsonl\.gz cannot be read: .*ended before"):
        read(write(tmp_path, "x.jsonl.gz", packed[:-9]))


@pytest.mark.parametrize("large", [1 << 60, 4])
@pytest.mark.parametrize("name", ["x.txt", "README.md", "x.py", "x"])
def test_a_text_is_one_document_without_its_mark(tmp_path, name, large):
    text = "eins\r\nzwei \u2028 drei\n"
    for content in (text.encode(), codecs.BOM_UTF8 + text.encode(), text.encode("utf-16")):
        (found,) = read(write(tmp_path, name, content), large=large)
        assert b"".join(found.chunks()).decode() == text


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("latin-1", r"no text in UTF-8: byte 0xfc after b'.*' *; it seems to be Latin-1, Windows-1252.*iconv"),
        ("utf-16-le", "it is in UTF-16LE; convert it: iconv -f UTF-16LE -t UTF-8"),
        ("utf-16-be", "it is in UTF-16BE; convert it"),
        ("utf-32", "it is in UTF-32; convert it"),
        ("utf-32-be", "it is in UTF-32BE; convert it"),
        ("koi8-r", "much of it is no UTF-8"),
        ("utf-16-le japanese", "it is in UTF-16LE; convert it"),
        ("utf-16-be japanese", "it is in UTF-16BE; convert it"),
    ],
)
def test_other_encodings_are_named_and_refused(tmp_path, encoding, message):
    text = {"koi8-r": "\u0442\u0435\u043a\u0441\u0442 "}.get(encoding, "A line for each, f\u00fcr alle.\n")
    text = "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3001\u4e8c\u3064\u3002" if "japanese" in encoding else text
    content = (text * 50).encode(encoding.split()[0])
    for name in ("x.txt", "x.jsonl", "x.csv"):
        path = write(tmp_path, name, content)
        with pytest.raises(UsageError, match=message):
            [b"".join(each.chunks()) for each in read(path)]
        with pytest.raises(UsageError, match=message):
            prompts_in(str(path))


def test_json_lines_in_a_text_are_said(tmp_path, caplog):
    assert len(read(write(tmp_path, "x.txt", lines(ROWS)))) == 1
    assert "x.txt has JSON in its lines, and is read as plain text" in caplog.text


CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a"}, {"text": "a"}),
        ({"content": "a", "id": 3}, {"text": "a", "unread": ("id",)}),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "text": "b"}),
        ({"question": "a", "answer": "b"}, {"prompt": "a", "text": "b"}),
        ({"instruction": "a", "input": "", "output": "b"}, {"prompt": "a", "text": "b", "is_instruction": True}),
        ({"instruction": "a", "input": "c", "output": "b"}, {"prompt": "a\n\nc", "text": "b", "is_instruction": True}),
        (
            {"instruction": "a", "context": "c", "response": "b"},
            {"prompt": "a\n\nc", "text": "b", "is_instruction": True},
        ),
        ({"messages": CHAT}, {"messages": CHAT}),
        ({"text": "", "messages": CHAT}, {"messages": CHAT}),
        ({"text": "a", "messages": CHAT}, {"messages": CHAT, "notice": "text beside messages, not read"}),
        ({"messages": json.dumps(CHAT)}, {"messages": CHAT}),
        (
            {"context": "c", "question": "a", "answer": "b"},
            {"prompt": "a", "text": "b", "notice": "input beside prompt, not read"},
        ),
        ("a text", {"text": "a text"}),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {"messages": CHAT}),
        ({"messages": CHAT, "tools": [{"name": "f"}]}, {"messages": CHAT, "tools": [{"name": "f"}]}),
        (
            {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
            {"messages": CHAT},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hel"}, "lo"]}, CHAT[1]]},
            {"messages": CHAT},
        ),
        ({"text": ""}, {"left_out": "empty"}),
        ({"text": None}, {"left_out": "empty"}),
        ({"text": 5}, {"left_out": "a number or a list instead of a text"}),
        (
            {"instruction": "a", "input": 5, "output": "b"},
            {"prompt": "a", "text": "b", "is_instruction": True, "notice": "input that is no text, not read"},
        ),
        ({"messages": CHAT[:1]}, {"messages": CHAT[:1], "left_out": "without an answer"}),
        ({"prompt": "a", "completion": ""}, {"prompt": "a", "left_out": "without an answer"}),
    ],
)
def test_a_row_is_a_document_by_the_usual_names(tmp_path, row, expected):
    (found,) = read(write(tmp_path, "x.jsonl", lines([row])))
    changed = {name: value for name, value in found._asdict().items() if value and name not in ("source", "where")}
    assert changed == expected
    assert found.where == f"{tmp_path / 'x.jsonl'}, at byte 0"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"a": 1}\n', 'at byte 0: a document is {"text": ...}.*it has a: name what to read by --columns'),
        ("x.jsonl", "[1]\n", "a document is"),
        ("x.jsonl", '{"text": "a"}\nnull\n', "at byte 14: a document is"),
        ("x.json", '[{"text": "a"}, null]', "item 2: a document is"),
        ("x.jsonl", '{"messages": [{"content": "a"}]}', "one there has no role"),
        (
            "x.jsonl",
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "url": "x"}]}]}',
            "a message has a part 'image_url'",
        ),
        ("x.json", '[{"text": "a"}, {"text": "b"} {"text": "c"}]', "item 2: it cannot be read as JSON: Expecting ','"),
        ("x.json", '[{"text": "a"}, {"te', "item 2: it cannot be read as JSON"),
        ("x.json", '[{"text": "a"}]]', "after the end of its array"),
        ("x.json", '{"version": 1, "data": [{"text": "a"}]}', "its documents are the list 'data'"),
        ("x.json", '{"data": [{"title": "a"}]}', "its documents are the list 'data'"),
        ("x.csv", "text,id\na,b,c\n", "line 2: 3 columns, but the first line names 2"),
        ("x.csv", 'text,id\n"a,b\nc,d\n', "line 2: unexpected end of data; is a quote missing in this row"),
        ("x.csv", 'text,id\na,b\n"c,d\n"e",f\n', "line 3: ',' expected after '\"'; is a quote missing in this row"),
        ("x.csv", "text,id,text\na,b,c\n", "its first line names 'text' twice"),
        ("x.jsonl", '{"text": "a"}\n{"text": "a", "text": "b"}\n', "at byte 14: .*: 'text' occurs twice"),
        ("x.json", '[{"text": "a"}, {"text": "a", "id": 1, "text": "b"}, {"text": "c"}]', "'text' occurs twice"),
        ("x.csv", "title,id\na,b\n", "it has title, id: name what to read"),
        ("x.json", "[" * 5000, "it is nested too deep"),
    ],
)
def test_what_is_no_document_is_one_line(tmp_path, name, content, message):
    with pytest.raises(UsageError, match=message) as said:
        read(write(tmp_path, name, content))
    assert "\n" not in str(said.value) and name in str(said.value)


@pytest.mark.parametrize("large", [1 << 60, 4])
@pytest.mark.parametrize("name", ["x.txt", "x.csv"])
def test_bytes_of_zero_are_said(tmp_path, caplog, name, large):
    path = write(tmp_path, name, "text,id\na,1\na text " + 20 * "\0" + 200 * "c" + ",2\n")
    (*_, found) = read(path, large=large)
    assert b"text " + bytes(20) in b"".join(found.chunks())
    assert caplog.text.count(f"{name} has bytes of zero, which are read as they are") == 1


def test_settings_in_json_are_a_text(tmp_path, caplog):
    content = '{\n "name": "a-program",\n "version": 1\n}\n'
    assert texts_of(write(tmp_path, "package.json", content)) == [content]
    assert "package.json has no documents, and is read as plain text" in caplog.text


def test_a_large_array_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("spmd_engine.formats.text_documents.CHUNK", 64)
    rows = [{"text": f'{number} \u6570 \\" ' * (number * 7 % 20 + 1)} for number in range(50)]
    path = write(tmp_path, "x.json", json.dumps(rows, ensure_ascii=False, indent=2))
    assert texts_of(path) == [row["text"] for row in rows]


@pytest.mark.parametrize("separator", [", ", ",\n ", " ,"])
def test_elements_with_text_like_a_border_of_elements_are_whole(tmp_path, monkeypatch, separator):
    monkeypatch.setattr("spmd_engine.formats.text_documents.CHUNK", 256)
    rows = [{"text": f'{number} }}{separator}{{"text": "x' * (number % 5)} for number in range(60)]
    chats = [{"messages": [*CHAT, {"role": "user", "content": '}, {"messages": ['}] * 2} for _ in range(9)]
    path = write(tmp_path, "x.json", "[" + separator.join(map(json.dumps, rows)) + "]")
    assert [each.text for each in read(path)] == [row["text"] for row in rows]
    path = write(tmp_path, "y.json", "[" + separator.join(map(json.dumps, chats)) + "]")
    assert [each.messages for each in read(path)] == [row["messages"] for row in chats]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text":\n"b"}\n', "at byte 14: this line cannot be read as JSON"),
        (
            '{"text": "\u00fc"}\n\n{"text": "a"} {"text": "b"}\n',
            "at byte 16: this line cannot be read as JSON: Extra data",
        ),
        ('{"text": "a"},\n', "at byte 0: this line"),
        ('{"text": "a\nb"}\n', "at byte 0: this line"),
    ],
)
def test_a_line_has_exactly_one_row(tmp_path, content, message):
    with pytest.raises(UsageError, match=message):
        read(write(tmp_path, "x.jsonl", content))


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_half_of_a_surrogate_pair_is_a_sign(tmp_path, name):
    rows = [{"text": text} for text in ("a", "b\ud800c", "\U0001f642", "\udc00", "d")]
    content = json.dumps(rows) if name == "x.json" else "".join(json.dumps(row) + "\n" for row in rows)
    assert texts_of(write(tmp_path, name, content)) == ["a", "b\ufffdc", "\U0001f642", "\ufffd", "d"]


@needs_pyarrow
def test_a_damaged_page_of_a_table_with_checksums_is_refused(tmp_path):
    from pyarrow import parquet, table

    path = tmp_path / "x.parquet"
    text = "a text without any other like it"
    parquet.write_table(
        table({"text": [text]}), path, compression="none", write_page_checksum=True, write_statistics=False
    )
    assert texts_of(path) == [text]
    path.write_bytes(path.read_bytes().replace(b"any other", b"any ather"))
    with pytest.raises(UsageError, match=r"x\.parquet cannot be read"):
        read(path)


PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


def among(folder, named=()):
    kept, others = documents_among(find_files([str(folder)]), None, [str(folder / name) for name in named])
    relative = len(str(folder)) + 1
    return [name[relative:] for name, _ in kept], {name[relative:]: kind for name, kind in others.items()}


def test_in_a_folder_of_source_code_other_files_are_left_out_by_name(tmp_path):
    for name in ("a.py", "b.py", "README.md", "empty.txt"):
        write(tmp_path, name, "" if name == "empty.txt" else "some text\n")
    (tmp_path / "docs").mkdir()
    write(tmp_path, "docs/logo.png", PNG)
    write(tmp_path, "table.csv", "a,b\n1,2\n")
    write(tmp_path, "weights.bin", b"some words of a header \0\1\xff" * 30)
    write(tmp_path, "settings.json", '{"name": "x"} // a comment')
    write(tmp_path, "more.jsonl", '{"text": "a"}\n')
    kept, others = among(tmp_path)
    assert kept == ["README.md", "a.py", "b.py", "empty.txt", "more.jsonl"]
    assert others == {
        "docs/logo.png": "a PNG image",
        "settings.json": "no documents in it",
        "table.csv": "no documents in it",
        "weights.bin": "with bytes of zero",
    }
    assert "table.csv" in among(tmp_path, ["table.csv"])[0]  # what is named is read, or is an error there
    write(tmp_path, "c.py", "f\u00fcr".encode("utf-16-le") * 20)
    with pytest.raises(UsageError, match="c.py is no text in UTF-8: it is in UTF-16LE"):
        among(tmp_path)


def test_a_folder_of_rows_is_not_filtered(tmp_path):
    write(tmp_path, "a.jsonl", '{"text": "a"}\n')
    write(tmp_path, "b.jsonl", '{"article": "a"}\n')
    write(tmp_path, "README.md", "some text")
    with pytest.raises(UsageError, match=r"b\.jsonl, at byte 0: a document is .*it has article: name what to read"):
        among(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "README.md"):
        (tmp_path / name).unlink()
    write(tmp_path, "a.png", PNG)
    with pytest.raises(UsageError, match=r"a\.png is no text: it is a PNG image"):
        among(tmp_path)


def test_the_first_row_names_the_keys_that_are_not_read(tmp_path):
    path = write(tmp_path, "x.csv", "id,text,url\n1,a,b\n2,c,d\n")
    assert [(each.text, each.unread) for each in read(path)] == [("a", ("id", "url")), ("c", ())]
    path = write(tmp_path, "x.jsonl", lines([{"prompt": "a", "completion": "b", "system_prompt": "c"}] * 2))
    assert [each.unread for each in read(path)] == [("system_prompt",), ()]


def test_columns_are_named(tmp_path):
    path = write(tmp_path, "x.csv", "title,body\na,b\n")
    assert texts_of(path, parse_columns("text=body")) == ["b"]
    (found,) = read(path, parse_columns("prompt=title,completion=body"))
    assert (found.prompt, found.text) == ("a", "b")
    with pytest.raises(UsageError, match="no 'bodi' there; it has title, body"):
        read(path, {"text": "bodi"})
    with pytest.raises(UsageError, match="--columns body: give WHAT=NAME"):
        parse_columns("body")


def test_spans_have_each_document_once(tmp_path):
    rng = random.Random(3)
    for name in ("a.txt", "b.jsonl", "c.csv", "d.jsonl.gz", "e.json"):
        rows = [{"text": f"{name} {number} " * rng.randrange(1, 4)} for number in range(5)]
        content = {".csv": "id,text\n" + table(rows), ".json": json.dumps(rows)}.get(format_name(name), lines(rows))
        marked = (codecs.BOM_UTF8 if name == "b.jsonl" else b"") + content.encode()
        write(tmp_path, name, gzip.compress(marked) if name.endswith("gz") else marked)
    files = find_files([str(tmp_path)])
    whole, total = read(tmp_path), sum(size for _, size in files)
    for parts in (2, 7, total):  # the last one: a byte each
        bounds = [total * part // parts for part in range(parts + 1)]
        spans = [list(documents(files, *span, 1 << 60)) for span in zip(bounds, bounds[1:])]
        assert [each for span in spans for each in span] == whole
        assert [count_documents(files, *span) for span in zip(bounds, bounds[1:])] == list(map(len, spans))


def test_prompts_are_lines_or_rows(tmp_path):
    content = "eins\r\n\nzwei \u2028 \x85 drei\n"
    assert [each.text for each in prompts_in(str(write(tmp_path, "x.txt", content)))] == [
        "eins",
        "zwei \u2028 \x85 drei",
    ]
    rows = [{"prompt": "a \u2028 b"}, {"messages": CHAT[:1], "tools": [1]}, {"instruction": "a", "input": "b"}]
    found = prompts_in(str(write(tmp_path, "x.JSONL", lines(rows))))
    assert [(each.text, each.messages, each.tools) for each in found] == [
        ("a \u2028 b", None, None),
        ("", CHAT[:1], [1]),
        ("a\n\nb", None, None),
    ]
    (named,) = prompts_in(str(write(tmp_path, "x.csv", "title,body\na,b\n")), {"prompt": "body"})
    assert named.text == "b"
    with pytest.raises(UsageError, match='it must be {"prompt": TEXT}.*it has a'):
        prompts_in(str(write(tmp_path, "y.jsonl", '{"a": 1}\n')))
