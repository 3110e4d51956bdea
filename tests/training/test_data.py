"""The corpus: what is read, what is held out, and samples that depend on the seed and their number alone."""

import bz2
import gzip
import io
import json
import lzma
import os
import re

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.errors import UsageError
from spmd_engine.formats.text_documents import find_files
from spmd_engine.formats.token_file import is_token_file
from spmd_engine.tokens.tokenizer import END_OF_FILE, ByteTokenizer
from spmd_engine.training.data.corpus import Corpus, load_corpus
from spmd_engine.training.data.prepare import prepare, prepare_with_summary
from support import tiny

CONTEXT = 8


def load(path, ranks=1):
    def program():
        with Mesh() as mesh:
            return load_corpus(mesh.group(), path and str(path), CONTEXT)

    return run_threads(program, ranks)


def load_corpus_of(text):
    with Mesh() as mesh:
        return load_corpus(mesh.group(), text, CONTEXT)


@pytest.fixture
def folder(tmp_path):
    for i in range(45):
        (tmp_path / f"{i:02}.txt").write_text(f"file number {i}\n" * (i + 1))
    (tmp_path / ".hidden").write_text("not read")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(bytes(range(256)))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("not read")
    return tmp_path


def test_every_rank_has_the_same_tokens(folder):
    corpora = load(folder, 3)
    for corpus in corpora:
        assert corpus.sha256 == corpora[0].sha256 and corpus.files == 45
        assert np.array_equal(corpus.train, corpora[0].train)
        assert np.array_equal(corpus.validation, corpora[0].validation)


@pytest.mark.parametrize(
    "target, message", [("..", "a folder, which is not read"), ("none.txt", "no file: restore it")]
)
def test_a_link_that_is_not_read_is_refused(folder, target, message):
    (folder / "00.txt").rename(folder / ".moved")
    (folder / "00.txt").symlink_to(".moved")  # as in the caches of files that are fetched
    assert len(find_files([str(folder)])) == load_corpus_of(str(folder)).files == 45
    (folder / "link.txt").symlink_to(target)
    for read in (lambda: load_corpus_of(str(folder)), lambda: find_files([str(folder)])):
        with pytest.raises(UsageError, match=f"link.txt is a link to {message}"):
            read()


def test_one_file_in_twenty_is_held_out_whole(folder):
    (corpus,) = load(folder)
    assert ByteTokenizer().decode(corpus.validation).split("-----") == [
        "file number 10\n" * 11 + "\n",
        "\n" + "file number 30\n" * 31 + "\n",
        "\n",
    ]
    assert "file number 10\n" not in ByteTokenizer().decode(corpus.train)
    assert "not read" not in ByteTokenizer().decode(corpus.train)
    assert (corpus.train == END_OF_FILE).sum() == 43


def test_folders_in_folders_are_read_in_the_order_of_their_paths(tmp_path):
    for name in ("b", "a/z", "a/deeper/y", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name} " * 20)
    (corpus,) = load(tmp_path)
    read = ByteTokenizer().decode(np.concatenate([corpus.train, corpus.validation])).split("-----")
    assert [text.split()[0] for text in read if text.strip()] == ["a/deeper/y", "a/z", "a.txt", "b"]


def test_of_one_file_the_end_is_held_out(tmp_path):
    content = b"some lines of text\n" * 100 + bytes(range(128))  # every byte is a token, though few are no text
    (tmp_path / "one.txt").write_bytes(content)
    (corpus,) = load(tmp_path / "one.txt")
    assert np.concatenate([corpus.train, corpus.validation]).tolist() == [*content, END_OF_FILE]
    assert CONTEXT < len(corpus.validation) < len(corpus.train) / 10


def test_the_standard_library_is_always_there():
    (corpus,) = load(None)
    assert len(corpus.train) > 5_000_000 and len(corpus.validation) > 200_000
    assert "def " in ByteTokenizer().decode(corpus.train[:100_000])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "nothing to read"),
        (b"short", "must be longer than the context of 8. .*smaller --length"),
    ],
)
def test_useless_files_are_refused_on_every_rank(tmp_path, content, message):
    path = tmp_path / "data"
    if content is not None:
        path.write_bytes(content)

    def program():
        with Mesh() as mesh, pytest.raises(UsageError, match=message):
            load_corpus(mesh.group(), str(path), CONTEXT)

    run_threads(program, 3)


def packed(kind):
    """A file that is no text."""
    file, text = io.BytesIO(), b"some text\n" * 1000
    if kind == "npz":
        np.savez(file, x=np.zeros((9, 8, 8), np.uint8), y=np.arange(9))
    return {
        "npz": file.getvalue(),
        "gzip": gzip.compress(text),
        "bzip2": bz2.compress(text),
        "xz": lzma.compress(text),
        "npy": b"\x93NUMPY\1\0" + text,
        "png": b"\x89PNG\r\n\x1a\n" + bytes(99),
        "pdf": b"%PDF-1.7\n" + text,
        "cyrillic": ("\u0442\u0435\u043a\u0441\u0442 " * 99).encode("koi8-r"),
        "weights": np.random.default_rng(0).standard_normal(5000).astype("f4").tobytes(),
        "weights behind text": text + np.random.default_rng(0).standard_normal(5000).astype("f4").tobytes(),
    }[kind]


NO_TEXT = {
    "npz": r"it is a zip archive, as \.npz and \.docx files are; .* models of images learn",
    "gzip": "it is compressed by gzip; unpack it first",
    "bzip2": "it is compressed by bzip2; unpack it first",
    "xz": "it is compressed by xz; unpack it first",
    "npy": "it is a NumPy array; of images, models of images learn",
    "png": "it is a PNG image; models of images learn from these",
    "pdf": "it is a PDF document; convert it to text first",
    "cyrillic": r"much of it is no UTF-8\. Convert it \(iconv -f ENCODING -t UTF-8\), or leave it out",
    "weights": r"much of it is no UTF-8\. Convert it",
    "weights behind text": r"much of it is no UTF-8\. Convert it",
}


@pytest.mark.parametrize("kind", NO_TEXT)
def test_what_is_no_text_is_refused_by_its_content(tmp_path, kind):
    """Whatever it is called, by those who learn from it as by those who encode it."""
    (tmp_path / "b.txt").write_bytes(packed(kind))
    with pytest.raises(UsageError, match=f"b.txt is no text: {NO_TEXT[kind]}") as said:
        load(tmp_path / "b.txt")
    assert "\n" not in str(said.value).partition("\nraised on rank")[0]
    with Mesh() as mesh, pytest.raises(UsageError, match=f"b.txt is no text: {NO_TEXT[kind]}"):
        prepare(mesh.group(), [str(tmp_path / "b.txt")], ByteTokenizer(), tmp_path / "x.tokens")


@pytest.mark.parametrize("kind", NO_TEXT)
def test_what_is_no_text_is_left_out_of_a_folder_by_its_name(tmp_path, kind):
    (folder := tmp_path / "some").mkdir()
    (folder / "a.txt").write_text("some text\n" * 100)
    (folder / "b.txt").write_bytes(packed(kind))
    with Mesh() as mesh:
        if kind in ("cyrillic", "weights behind text"):  # a text that can be converted, or a beginning that is one
            with pytest.raises(UsageError, match=f"b.txt is no text: {NO_TEXT[kind]}"):
                load(folder)
            return
        (corpus,) = load(folder)
        assert re.search(r"from 1 files; 1 left out: .+ \(b\.txt\)$", str(corpus))
        file, summary = prepare_with_summary(mesh.group(), [str(folder)], ByteTokenizer(), tmp_path / "x.tokens")
    assert file.facts.files == 1
    assert str(summary[1]).startswith(f"{folder}/b.txt: left out: ")


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".json.gz"])
def test_each_row_is_a_text_with_an_end(tmp_path, ending):
    texts = [f"text number {number}, " * 3 for number in range(60)]
    rows = [{"id": 1, "text": text} for text in texts]
    content = {
        ".jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        ".csv": "id,text\n" + "".join(f'1,"{text}"\n' for text in texts),
        ".json.gz": json.dumps([*rows, {"id": 1, "text": ""}]),
    }[ending].encode()
    (tmp_path / f"x{ending}").write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    (corpus,) = load(tmp_path / f"x{ending}")
    held_out = texts[10::20]
    written = [text for text in texts if text not in held_out] + held_out
    found = np.concatenate([corpus.train, corpus.validation])
    assert found.tolist() == [token for text in written for token in (*text.encode(), END_OF_FILE)]
    assert ByteTokenizer().decode(corpus.validation).split("\n-----\n") == [*held_out, ""]
    left_out = "; 1 left out: empty" if ending == ".json.gz" else ""
    assert str(corpus).endswith(f"tokens from 1 files, 60 documents{left_out}; not read: id")


def test_instructions_are_no_text_of_bytes(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    with pytest.raises(UsageError, match=r"x\.jsonl, at byte 0: an instruction, .* encode it first: data prepare"):
        load(tmp_path / "x.jsonl")


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        UsageError, match="pipe: neither a file nor a folder; write the output of a pipe into a file first"
    ):
        load(tmp_path / "pipe")
    assert not is_token_file(tmp_path / "pipe")


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nothing to read"):
        load(tmp_path)


def test_samples_depend_on_seed_and_number_alone():
    corpus = Corpus(np.arange(1000, dtype=np.uint16), np.arange(50, dtype=np.uint16), 1, "")

    def program(axes):
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh)
            batch = corpus.windows(CONTEXT, seed=4).batch(engine, 3, size=10, micro_batches=2)
            rows = np.concatenate([m.inputs for m in batch.micro_batches])
            samples = np.concatenate([m.samples for m in batch.micro_batches])
            assert all(np.array_equal(m.targets, m.inputs + 1) for m in batch.micro_batches)
            assert batch.count == 10 * CONTEXT
            return dict(zip(samples.tolist(), rows.tolist(), strict=True))

    (whole,) = run_threads(program, 1, args=({"data": 1},))
    assert sorted(whole) == list(range(10))
    pieces = run_threads(program, 3, args=({"data": 3},))
    assert {k: v for piece in pieces for k, v in piece.items()} == whole
    assert sum(map(len, pieces)) == 10


def test_validation_windows_are_spread_over_all_that_is_held_out():
    corpus = Corpus(np.arange(100, dtype=np.uint16), np.arange(200, dtype=np.uint16), 1, "")
    with Mesh() as mesh:
        batches = corpus.windows(CONTEXT).validation_batches(tiny.make_engine(mesh), samples=5, size=2)
    starts = [int(row[0]) for batch in batches for row in batch.micro_batches[0].inputs]
    assert [len(batch.micro_batches[0].inputs) for batch in batches] == [2, 2, 1]
    assert starts[0] == 0 and starts[-1] == 200 - CONTEXT - 1 and len(set(starts)) == 5


def test_text_survives_tokens():
    assert ByteTokenizer().decode(ByteTokenizer().encode("naïve – 数")) == "naïve – 数"
    assert ByteTokenizer().decode([104, 105, END_OF_FILE, 0xFF]) == "hi\n-----\n\ufffd"


def test_the_digest_is_of_the_files_not_of_their_folder(folder, tmp_path):
    (tmp_path / "copy").mkdir()
    for file in folder.glob("*.txt"):
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    (moved,) = load(tmp_path / "copy")
    for file in folder.glob("*.txt"):
        file.rename(tmp_path / "copy" / file.name)
    assert load(tmp_path / "copy")[0].sha256 == moved.sha256


def test_empty_files_held_out_do_not_spoil_a_corpus(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}").write_text("" if i == 10 else "some text\n" * 20)
    (corpus,) = load(tmp_path)
    assert CONTEXT < len(corpus.validation) < len(corpus.train)


def test_an_empty_path_is_not_the_standard_library():
    with pytest.raises(UsageError, match="--data is empty"):
        load_corpus_of("")
