"""Whether processes live: what the tests of the harness share."""

from pathlib import Path


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # a zombie has none
    except FileNotFoundError:
        return False
