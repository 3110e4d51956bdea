"""Output that cannot be written is lost, and written again once it can be."""

import logging
import os
import sys

from spmd_engine.runtime.output import lossy_output


def open_full():
    return open("/dev/full", "w", buffering=1)


def test_a_text_is_written_again_once_there_is_room(monkeypatch, tmp_path):
    """A disk that was full may have room later."""
    log = tmp_path / "log"
    with open_full() as stream, log.open("w") as with_room:
        monkeypatch.setattr(sys, "stderr", stream)
        with lossy_output("stderr"):
            print("lost", file=sys.stderr)
            os.dup2(with_room.fileno(), stream.fileno())
            print("kept", file=sys.stderr)
            logging.StreamHandler().emit(logging.makeLogRecord({"msg": "warned"}))
    assert log.read_text() == "kept\nwarned\n"
