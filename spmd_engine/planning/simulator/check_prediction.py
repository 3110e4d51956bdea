"""A step that was made beside the one that was foretold: calls and bytes by line of the ledger, of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.model import Model
from spmd_engine.planning.dry_run.step_analysis import StepAnalysis
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.simulator.simulation import simulate

Line = tuple[str, str, str]  # operation, axes and label
Sums = Mapping[Line, tuple[int, float]]  # calls and bytes sent


def foretold_sums(analysis: StepAnalysis) -> dict[Line, tuple[int, float]]:
    """Calls and bytes of all ranks, by line, in the order in which they begin."""
    sums: dict[Line, list[float]] = {}
    for each in analysis.classes:
        for line, (calls, _, sent) in each.step.ledger().items():
            have = sums.setdefault(line, [0, 0])
            have[0] += each.count * calls
            have[1] += each.count * sent
    return {line: (round(calls), round(sent)) for line, (calls, sent) in sums.items()}


def routed_labels(model: Model) -> set[str]:
    """The layers that send samples where their values say: what they send, only data decide."""
    return {name for name, layer in model.layers if "E" in layer.sizes}


def differences(
    foretold: Sums, made: Sequence[Sums], routed: Collection[str] = (), sizes: Mapping[str, int] | None = None
) -> list[str]:
    """Where a step did other than was foretold, the first first; ``made`` is each rank's own account of it.

    Of an all_to_all of a layer that routes (``routed``) the calls must be equal, and the bytes at most what they are
    if every row leaves its rank: of what is foretold, where they go to all ranks of the axes alike, n/(n-1) times.
    ``sizes`` are those of the mesh's axes.
    """
    sums: dict[Line, list[float]] = {}
    for ledger in made:
        for line, (calls, sent) in ledger.items():
            have = sums.setdefault(line, [0, 0])
            have[0], have[1] = have[0] + calls, have[1] + sent
    found = []
    for line in dict.fromkeys((*foretold, *sums)):
        (calls, sent), (real_calls, real_sent) = foretold.get(line, (0, 0)), sums.get(line, (0, 0))
        operation, axes, label = line
        if operation == "all_to_all" and label in routed:
            most = _most(sent, axes, sizes or {})
            if calls == real_calls and real_sent <= most:
                continue
            sent_text = f"at most {most:,.0f} bytes"
        elif (calls, sent) == (real_calls, real_sent):
            continue
        else:
            sent_text = f"{sent:,.0f} bytes"
        found.append(
            f"{operation} over {axes}{f' ({label})' if label else ''}: {calls:,} calls and {sent_text} foretold, "
            f"{real_calls:,} calls and {real_sent:,.0f} bytes made, by all ranks together"
        )
    return found


def _most(sent: float, axes: str, sizes: Mapping[str, int]) -> float:
    """Bytes if every row leaves its rank, of what is sent where rows go to all ranks of the axes alike."""
    ranks = prod(sizes.get(axis, 1) for axis in axes.split(","))
    return sent * ranks / max(1, ranks - 1)


def routed_bytes(
    foretold: Sums, made: Sequence[Sums], routed: Collection[str], sizes: Mapping[str, int]
) -> dict[str, float]:
    """Bytes that layers which route sent, beside those if rows had gone to all ranks alike, and at the most; empty
    where nothing is routed. The least is 0: every row may find its experts where it is."""
    lines = [line for line in foretold if line[0] == "all_to_all" and line[2] in routed]
    if not lines:
        return {}
    return {
        "sent": sum(ledger[line][1] for ledger in made for line in lines if line in ledger),
        "balanced": sum(foretold[line][1] for line in lines),
        "most": round(sum(_most(foretold[line][1], line[1], sizes) for line in lines)),
    }


def facts_of(analysis: StepAnalysis, find_machine: Callable[[], Machine]) -> dict[str, Any]:
    """What ``metrics.jsonl`` tells of a step that was foretold; of its seconds, if there is a machine of so many
    ranks."""
    facts = {"bytes_sent": analysis.bytes_sent, "calls": analysis.calls, "peak_bytes": analysis.peak_bytes}
    try:
        machine = find_machine()
        return facts | {"seconds": simulate(analysis, machine).seconds, "machine": machine.name}
    except UsageError:
        return facts
