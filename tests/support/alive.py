"""A helper for the tests of the harness: whether a process is alive."""

from pathlib import Path


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # a zombie has none
    except FileNotFoundError:
        return False
