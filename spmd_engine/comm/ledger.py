"""The ledger: calls, bytes and seconds of communication by operation, axes and label."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from spmd_engine.arguments import checked
from spmd_engine.pictures import html_table

Name = Literal["all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "receive", "reduce_scatter", "send"]


@dataclass
class Entry:
    """One line of the ledger, for one rank."""

    calls: int = 0
    payload: int = 0  #: bytes of the input arrays
    sent: int = 0  #: bytes that this rank sends by the bandwidth-optimal algorithm, without signatures
    seconds: float = 0.0  #: time in starts and waits, without communication that overlaps with work

    def add(self, other: Entry) -> None:
        self.calls += other.calls
        self.payload += other.payload
        self.sent += other.sent
        self.seconds += other.seconds


class Ledger:
    """Entries keyed by (operation, axes, label), for example ("all_reduce", "data", "gradients").

    ``sent`` follows the formulas: for an array of S bytes over n ranks, S(n-1)/n per rank for all_gather,
    reduce_scatter and all_to_all, twice that for all_reduce. With uneven shards the sum over ranks is exact:
    S(n-1), and 2 S(n-1).
    """

    def __init__(self) -> None:
        self.entries: defaultdict[tuple[str, str, str], Entry] = defaultdict(Entry)
        self.rounded: set[tuple[str, str, str]] = set()  #: entries with sums of 16-bit floats, each rounded before
        #: called after each wait: operation, axes, label and seconds
        self.observer: Callable[[str, str, str, float], None] | None = None

    def record(self, where: tuple[str, str, str], payload: int, sent: int, seconds: float | None = None) -> None:
        """Add a call to the entry ``where``; ``seconds``: of its wait, if it had only one."""
        entry = self.entries[where]
        entry.calls += 1
        entry.payload += payload
        entry.sent += sent
        if seconds is not None:
            entry.seconds += seconds
            if self.observer:
                self.observer(*where, seconds)

    def record_wait(self, where: tuple[str, str, str], seconds: float) -> None:
        """Add the seconds of a start or a wait to the entry ``where``."""
        self.entries[where].seconds += seconds
        if self.observer:
            self.observer(*where, seconds)

    @checked()
    def total(self, operation: Name | None = None, axes: str | None = None, label: str | None = None) -> Entry:
        """The sum over all entries that match the given fields."""
        total = Entry()
        wanted = (operation, axes, label)
        for key, entry in self.entries.items():
            if all(want is None or want == field for want, field in zip(wanted, key, strict=True)):
                total.add(entry)
        return total

    def clear(self) -> None:
        self.entries.clear()
        self.rounded.clear()

    def __repr__(self) -> str:
        lines = (
            f"{operation} over {axes}{f' ({label})' if label else ''}: {entry.calls} calls, {entry.sent:,} bytes sent"
            for (operation, axes, label), entry in sorted(self.entries.items())
        )
        return f"Ledger({'; '.join(lines) or 'no calls'})"

    def __str__(self) -> str:
        lines = [f"{'operation':<15} {'axes':<12} {'label':<24} {'calls':>7} {'sent':>14} {'seconds':>9}"]
        for (operation, axes, label), entry in sorted(self.entries.items()):
            lines.append(
                f"{operation:<15} {axes:<12} {label:<24} {entry.calls:>7} {entry.sent:>14,} {entry.seconds:>9.3f}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            (operation, axes, label, f"{entry.calls:,}", f"{entry.sent:,}", f"{entry.seconds:.3f}")
            for (operation, axes, label), entry in sorted(self.entries.items())
        ]
        return html_table("Ledger of this rank", ["operation", "over", "label", "calls", "bytes sent", "seconds"], rows)
