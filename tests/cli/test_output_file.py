"""What commands write is there whole, or not at all; and what they say of what cannot be."""

import errno
import json
import os

import numpy as np
import pytest

from spmd_engine import Mesh, TrainConfig
from spmd_engine.checkpoints.format.folder import replace_file
from spmd_engine.cli.bench.measuring import report
from spmd_engine.errors import UsageError
from spmd_engine.files import output_file
from spmd_engine.tokens import ByteTokenizer
from spmd_engine.training.data.prepare import prepare
from support.command_line import QUIET, TEXT, limited

pytestmark = pytest.mark.usefixtures("narrow")


def test_a_file_that_cannot_be_completed_leaves_what_was_there(tmp_path):
    path = tmp_path / "y.npy"
    path.write_bytes(b"old")
    with pytest.raises(UsageError, match=r"--output .*y\.npy: cannot be written \(No space"), output_file(path) as file:
        file.write(b"half of")
        raise OSError(28, "No space left on device")
    assert path.read_bytes() == b"old" and [each.name for each in tmp_path.iterdir()] == ["y.npy"]
    (tmp_path / "link").symlink_to(path)
    with output_file(tmp_path / "link") as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and (tmp_path / "link").is_symlink()


def test_no_name_that_others_can_guess_is_written_to(tmp_path):
    (tmp_path / "victim").write_bytes(b"theirs")
    (tmp_path / f".y.npy.{os.getpid()}").symlink_to(tmp_path / "victim")
    with output_file(tmp_path / "y.npy") as file:
        file.write(b"new")
    assert (tmp_path / "y.npy").read_bytes() == b"new" and (tmp_path / "victim").read_bytes() == b"theirs"


def test_what_cannot_be_written_is_named_by_its_option(here, tmp_path):
    here("train", "--model", "mlp", "--run", "mine", "--steps", "1", "--batch-size", "2", *QUIET, *TEXT)
    np.save(tmp_path / "x.npy", np.zeros((1, 784)))
    infer = ["infer", "--run", "mine", "--input", "x.npy", "--output"]
    assert here(*infer, "/dev/full")[2].startswith("spmd_engine: --output /dev/full: cannot be written (")
    assert here(*infer, "/dev/null")[0] == 0
    (tmp_path / "text").write_text("def")
    code, _, errors = here("infer", "--run", "mine", "--input", "text", "--output", "y.npy")
    assert code == 2 and "text is not an .npy array" in errors and "pickle" not in errors
    code, _, errors = here("plan", "--ranks", "2", "--model", "mlp", "--mesh", "data=2", "--timeline", "/dev/full")
    assert code == 2 and "--timeline /dev/full: cannot be written (No space" in errors


def test_a_full_disk_is_one_line_that_names_the_file_and_leaves_nothing(here, tmp_path):
    (tmp_path / "text").write_text("def " * 99)
    plan = ["plan", "--ranks", "2", "--model", "mlp", "--mesh", "data=2", "--output", "p.json"]
    for command, name in (["new", "mine"], "mine"), (plan, "p.json"):
        told = []
        limited(0, lambda command=command, told=told: told.append(here(*command)))
        ((code, _, errors),) = told
        assert code == 2 and name in errors and errors.endswith(("File too large)\n", "File too large\n"))
        assert [path.name for path in tmp_path.iterdir()] == ["text"]

    with Mesh() as mesh, pytest.raises(UsageError, match=r"File too large: 'x\.tokens'"):
        limited(0, lambda: prepare(mesh.group(), ["text"], ByteTokenizer(), "x.tokens"))
    for write in (
        lambda path: report(["a"], [["1"]], {"a": 1}, path),
        TrainConfig().write,
        lambda path: replace_file(path, "text"),
    ):
        with pytest.raises((UsageError, OSError), match=r"y\.json"):
            limited(0, lambda write=write: write(tmp_path / "y.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(
    "number, words",
    [(errno.ENOSPC, "No space left on device; 'doctor' names limits"), (errno.EMFILE, "Too many open files; raise")],
)
def test_a_shortage_that_names_no_file_is_one_line(here, monkeypatch, number, words):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("spmd_engine.cli.new.files", fail)
    code, _, errors = here("new", "mine")
    assert code == 2 and errors.startswith(f"spmd_engine: {words}") and errors.count("\n") == 1


def test_names_that_are_no_utf_8_are_written_as_they_are(here, tmp_path):
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / name).write_text("def " * 9999)
    few = ["--model", "mlp", "--batch-size", "2", *QUIET, "--data", name, "--run", f"r-{name}"]
    assert here("train", "--steps", "1", *few)[0] == 0
    assert here("train", "--steps", "2", "--resume", "--run", f"r-{name}")[0] == 0
    assert here("report", f"r-{name}", "-o", "page.html")[0] == 0
    assert r"r-caf\udce9" in (tmp_path / "page.html").read_text()
    assert here("new", f"n-{name}")[0] == 0
    assert b"caf\xe9" in (tmp_path / f"n-{name}" / "README.md").read_bytes()


def test_a_text_too_short_to_be_scored_is_named(here, tmp_path):
    here("train", "--run", "mine", "--steps", "0", "--batch-size", "2", *QUIET, *TEXT)
    (tmp_path / "empty.txt").write_bytes(b"")
    code, _, errors = here("eval", "--run", "mine", "--file", "empty.txt")
    assert code == 2 and "'empty.txt' has 0 token(s)" in errors


def test_texts_are_answered_a_row_each_by_the_columns_that_are_named(here, tmp_path):
    few = ["--batch-size", "2", "--length", "16", *QUIET]
    (tmp_path / "x.csv").write_text("title,body\n" + "".join(f"t{number},body {number}\n" for number in range(40)))
    code, _, errors = here("train", "--run", "mine", "--steps", "0", *few, "--data", "x.csv", "--columns", "text=body")
    assert code == 0 and "40 documents; not read: title" in errors
    code, _, errors = here("train", "--run", "other", "--steps", "0", *few, "--data", "x.csv", "--columns", "text=bodi")
    assert code == 2 and "line 2: no 'bodi' there; it has title, body" in errors
    code, _, errors = here("train", "--run", "other", "--steps", "0", *few, "--columns", "text=body")
    assert code == 2 and "--columns text=body: what is read without --data has no rows of text" in errors
    (tmp_path / "y.csv").write_text("title,body\na,of bytes\nb,one\n")
    code, out, errors = here("eval", "--run", "mine", "--file", "y.csv", "--columns", "text=body", "--json")
    assert code == 0, errors
    scored = [json.loads(line) for line in out.splitlines()]
    assert [bytes(each["tokens"]) for each in scored] == [b"of bytes", b"one"]
    infer = ["infer", "--run", "mine", "--columns", "text=body", "--output", "y.npy", "--input"]
    code, _, errors = here(*infer, "y.csv")
    assert code == 0 and "y.csv: 2 texts, of at most 8 tokens" in errors, errors
    logits = np.load(tmp_path / "y.npy").astype(np.float64)
    assert logits.shape[:2] == (2, 8) and np.isnan(logits[1, 3:]).all() and not np.isnan(logits[1, :3]).any()
    for row, each in zip(logits, scored, strict=True):
        tokens = np.array(each["tokens"])
        row = row[: len(tokens) - 1]
        found = row[np.arange(len(row)), tokens[1:]] - np.log(np.exp(row).sum(1))
        np.testing.assert_allclose(found, each["log_probs"], atol=1e-5)
    (tmp_path / "long.txt").write_text("x" * 9999)
    code, _, errors = here(*infer, "long.txt")
    assert code == 2 and "long.txt: 9,999 tokens; gpt-nano reads 1 to" in errors


def test_what_is_no_text_and_what_is_damaged_is_not_scored(here, tmp_path):
    here("train", "--run", "mine", "--steps", "0", "--batch-size", "2", *QUIET, *TEXT)
    np.savez(tmp_path / "x.npz", x=np.zeros(99))
    code, _, errors = here("eval", "--run", "mine", "--file", "x.npz")
    assert code == 2 and "x.npz is no text: it is a zip archive" in errors
    (tmp_path / "x.jsonl").write_text('{"text": "some text"}\n' * 40)
    here("data", "prepare", "x.jsonl", "--output", "x.tokens")
    assert here("data", "inspect", "x.tokens", "--verify")[0] == 0
    assert here("eval", "--run", "mine", "--file", "x.tokens")[0] == 0
    content = (tmp_path / "x.tokens").read_bytes()
    (tmp_path / "x.tokens").write_bytes(content.replace(b"s\0o\0m\0e", b"s\0a\0m\0e", 1))
    for command in (["eval", "--run", "mine", "--file"], ["data", "inspect", "--verify"]):
        code, _, errors = here(*command, "x.tokens")
        assert code == 2 and "x.tokens is damaged: its documents are not what was written" in errors


def test_no_command_is_answered_with_all_of_them(here):
    code, _, errors = here()
    assert code == 2 and errors.startswith("Usage:") and "checkpoint" in errors


def test_numbers_are_whole_however_narrow_the_terminal(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    code, output, _ = here("analyze", "--model", "gpt2", "--mesh", "data=4,model=2")
    assert code == 0 and "\N{HORIZONTAL ELLIPSIS}" not in output
    (total,) = (line for line in output.splitlines() if line.startswith("a step of all ranks"))
    assert total.endswith("bytes sent")


def test_checkpoint_inspect_prints_sizes_as_text_and_as_json(here, tmp_path):
    here("train", "--model", "mlp", "--run", "mine", "--steps", "1", "--batch-size", "2", *QUIET, *TEXT)
    told = here("checkpoint", "inspect", "mine", "--no-arrays")[1]
    sizes = json.loads(here("checkpoint", "inspect", "mine", "--no-arrays", "--json")[1])["bytes"]
    assert f"model {sizes['model']:,}, optimizer {sizes['optimizer']:,}\n" in told


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("checkpoint export r out.npz", "export out.npz: a .safetensors file is written here, no .npz file"),
        ("checkpoint export r out.gguf --format huggingface", "export out.gguf: a folder is written here, no .gguf"),
        ("infer --run r --input x.npy --output y.csv", "--output y.csv: a .npy file is written here, no .csv file"),
        ("data prepare x.npy --output x.npz", "--output x.npz: a .tokens file is written here, no .npz file"),
        ("plan --ranks 2 --output plan.toml", "--output plan.toml: a .json file is written here, no .toml file"),
        ("calibrate --output m.json", "--output m.json: a .toml file is written here, no .json file"),
        ("bench train --output b.png", "--output b.png: a .json file is written here, no .png file"),
    ],
)
def test_the_ending_of_another_format_is_refused(command, said, here, r, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((1, 8), np.int64))
    code, _, errors = here(*command.split())
    assert code == 2 and errors.startswith(f"spmd_engine: {said}") and errors.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".npz", ".csv", ".gguf", ".toml", ".json")]


def test_a_failed_allocation_is_one_line(here, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("spmd_engine.cli.show.model_on", fail)
    code, _, errors = here("inspect", "--mesh", "data=2")
    assert code == 2
    assert errors == (
        "spmd_engine: there is not enough memory for this: an allocation failed; try a smaller batch, more "
        "micro-batches or more ranks; 'doctor' names limits of memory\n"
    )


class Chatty(ByteTokenizer):
    chat_template = "<{{ messages[-1].content }}>"
    special = {}


def test_of_messages_the_reply_alone_is_printed(here, r, monkeypatch):
    pytest.importorskip("jinja2")
    monkeypatch.setattr("spmd_engine.cli.generate.ByteTokenizer", Chatty)
    ask = ["generate", "--run", "r", "--tokens", "3", "--prompt", "Hello"]
    told = {each: here(*ask, *each.split())[1] for each in ("--chat", "--chat --echo", "", "--no-echo")}
    reply, written = (json.loads(here(*ask, *more, "--json")[1])["text"] for more in (["--chat"], []))
    assert told["--chat"] == f"{reply}\n" and told["--chat --echo"] == f"<Hello>{reply}\n"
    assert told[""] == f"Hello{written}\n" and told["--no-echo"] == f"{written}\n"
    both = here(*ask, "--prompt", "Bye", "--chat")[1]
    assert both.startswith("--- 1 of 2\n") and "<" not in both.replace(reply, "")
