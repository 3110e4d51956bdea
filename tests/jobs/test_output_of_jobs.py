"""Training goes on if its output cannot be written, and a command ends if nobody reads it."""

import os
import signal
import sys

import pytest

from spmd_engine.cli import main
from support.command_line import QUIET, TEXT, metrics

JOB = ["train", "--model", "mlp", "--batch-size", "4", *QUIET, *TEXT, "--run", "r"]


def open_without_reader():
    """A buffered text stream, as standard output is, whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def open_full():
    return open("/dev/full", "w", buffering=1)


def not_opened():
    return None


@pytest.mark.parametrize("open_stream", [open_without_reader, open_full, not_opened])
def test_training_goes_on_and_saves_when_its_output_cannot_be_written(open_stream, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in "stdout", "stderr":
        monkeypatch.setattr(sys, name, open_stream())
    main([*JOB, "--steps", "3", "--report"])
    assert [line["step"] for line in metrics(tmp_path / "runs" / "r")] == [1, 2, 3]
    assert (tmp_path / "runs" / "r" / "checkpoints" / "latest" / "manifest.json").exists()
    for name in "stdout", "stderr":
        if stream := getattr(sys, name):
            stream.close()  # its buffer is empty, as it must be when Python ends


@pytest.mark.parametrize("open_stream", [open_without_reader, open_full])
def test_a_mistake_keeps_its_exit_code_when_its_message_cannot_be_written(open_stream, monkeypatch):
    with open_stream() as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(SystemExit) as left:
            main([*JOB, "--steps", "x"])
    assert left.value.code == 2


def test_a_short_command_ends_when_its_reader_has(monkeypatch):
    """As `show ... | head`: there is nothing else that it should do."""
    with open_without_reader() as closed, pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "stdout", closed)
        main(["show", "collective", "all_reduce", "--mesh", "data=4"])


def test_a_table_ends_when_its_reader_has(monkeypatch):
    """As `inspect ... | head`, whose printer, rich, ends the program by an exception of its own."""
    with open_without_reader() as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as left:
            main(["inspect", "--mesh", "data=1"])
    assert left.value.code == 128 + signal.SIGPIPE
