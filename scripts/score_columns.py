"""Runs of GPTs in a table that was not prepared for: each column by one of the names that it usually has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: What is needed of a run, and how columns are called that tell it.
NAMES = {
    "hidden": ("hidden", "hidden_size", "width", "d_model", "embedding"),
    "layers": ("layers", "num_layers", "n_layers", "depth"),
    "heads": ("heads", "num_heads", "attention_heads", "n_heads"),
    "global_batch": ("global_batch", "global_batch_size", "gbs", "batch_size", "batch"),
}
#: What else is used, and what is taken where no column tells it.
OTHERS: Mapping[str, tuple[Sequence[str], int]] = {
    "sequence": (("sequence", "seq", "seq_len", "sequence_length", "seq_length", "context"), 2048),
    "vocabulary": (("vocabulary", "vocab", "vocab_size"), 51200),
    "tp": (("tp", "tensor", "tensor_parallel", "model_parallel"), 1),
    "dp": (("dp", "data", "data_parallel", "dp_fsdp"), 1),
    "pp": (("pp", "pipe", "pipeline", "pipeline_parallel"), 1),
    "micro_batch": (("micro_batch", "micro_batch_size", "mbs"), 0),
}
#: Columns of a step's time, and how many seconds one of their units is.
TIMES = {"seconds": 1.0, "step_s": 1.0, "iteration_s": 1.0, "step_seconds": 1.0, "iteration_ms": 1e-3, "step_ms": 1e-3}


@dataclass(frozen=True)
class Columns:
    """Which columns of a table tell what, and what of it is not told."""

    found: Mapping[str, str]  #: what is needed -> the column
    time: str | None
    missing: Sequence[str]
    assumed: Mapping[str, int]
    unused: Sequence[str]

    @classmethod
    def of(cls, names: Sequence[str]) -> Columns:
        """Of a table with these columns."""
        lower = {name.strip().lower(): name for name in names}
        found = {}
        for what, known in (*NAMES.items(), *((what, known) for what, (known, _) in OTHERS.items())):
            if column := next((lower[each] for each in known if each in lower), None):
                found[what] = column
        time = next((lower[each] for each in TIMES if each in lower), None)
        missing = [what for what in NAMES if what not in found] + ["a step's time"] * (time is None)
        assumed = {what: default for what, (_, default) in OTHERS.items() if what not in found and default}
        used = {*found.values(), time}
        return cls(found, time, missing, assumed, [name for name in names if name not in used])

    def run(self, row: Mapping[str, str]) -> dict[str, float] | None:
        """The numbers of a row; None if one of them is none, or makes no sense."""
        try:
            values = {what: int(row[column]) for what, column in self.found.items()}
            seconds = float(row[self.time or ""]) * TIMES[(self.time or "").strip().lower()]
        except (KeyError, TypeError, ValueError):
            return None
        values = {what: default for what, (_, default) in OTHERS.items()} | values
        values["micro_batch"] = values["micro_batch"] or values["global_batch"] // max(values["dp"], 1)
        sensible = all(value > 0 for value in values.values()) and 0 < seconds < float("inf")
        whole = sensible and values["global_batch"] % (values["micro_batch"] * values["dp"]) == 0
        return values | {"seconds": seconds} if whole and values["hidden"] % values["heads"] == 0 else None
