"""The machine that is planned for where none is named: the one that ``calibrate`` measured here."""

from __future__ import annotations

import os
from pathlib import Path

from spmd_engine.planning.machine import Machine
from spmd_engine.planning.machine_file import read_machine


def calibrated_file() -> Path:
    """Where ``calibrate`` writes what it measured, unless told otherwise: ``SPMD_MACHINE``, or in the user's cache."""
    if named := os.environ.get("SPMD_MACHINE"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "spmd_engine" / "machine.toml"


def default_machine(name: str | None = None) -> Machine:
    """The machine of this name or file; None: what was calibrated here, else the packaged ``cpu``."""
    if name is not None:
        return read_machine(name)
    return read_machine(calibrated_file() if calibrated_file().is_file() else "cpu")
