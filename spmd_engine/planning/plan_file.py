"""A plan as a file: a composition and micro-batches for one model on so many ranks, and what was predicted of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from spmd_engine.configuration import Configuration, setting
from spmd_engine.engine.parallel_config import Composition, ModelConfig
from spmd_engine.errors import UsageError
from spmd_engine.foreign import json_at

VERSION = 1


@dataclass(frozen=True)
class PlanFile(Configuration):
    """What ``plan --output`` writes and ``train --plan`` runs."""

    ranks: int = setting(1, least=1)
    version: int = VERSION
    model: ModelConfig = ModelConfig()
    batch_size: int = setting(16, least=1)  #: samples a step
    micro_batches: int = setting(1, least=1)
    composition: Composition = Composition()
    optimizer: str = "adamw"
    machine: str = ""  #: that it was made for
    goal: str = ""
    seconds: float = 0.0  #: of a step, as predicted
    bytes_sent: int = 0  #: of a step, by all ranks
    peak_bytes: int = 0  #: of the rank that holds most

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The plan of a file; raises UsageError, in one line, for one that cannot be read or makes no sense."""
        content = json_at(path)
        if not isinstance(content, Mapping) or content.get("version") != VERSION or "ranks" not in content:
            raise UsageError(f"{path}: no plan; 'plan --output FILE' writes one")
        return cls.from_json(content, str(path))

    def write(self, path: str | Path) -> None:
        """Write what ``read`` reads."""
        try:
            Path(path).write_text(json.dumps(self.as_json(), indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"--output {path}: {error.strerror or error}") from error

    def check(self, ranks: int, model: str | None, where: str) -> None:
        """Raise UsageError if the plan was made for another number of ranks, or another model."""
        if ranks != self.ranks:
            raise UsageError(
                f"{where} was made for {self.ranks} ranks, and there are {ranks}: start as many, or plan anew"
            )
        if model is not None and model != self.model.name:
            raise UsageError(f"{where} was made for {self.model.name}, not for {model}: plan --model {model}")
