"""``plan explain``: answers to common questions about memory and time, from dry runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from spmd_engine.errors import counted
from spmd_engine.planning.plan_result import Request
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.neighbours import places_on
from spmd_engine.planning.search.plan_search import evaluate_plan
from spmd_engine.planning.search.search_space import Candidate, fields_of
from spmd_engine.units import readable_bytes, readable_seconds

MOST_BATCH = 1 << 20
MOST_DOUBLINGS = 12

Answer = tuple[Sequence[str], Any]  #: lines of text, and the same as data


def explain(request: Request) -> tuple[str, list[dict[str, Any]]]:
    """A line about the explained plan, with the requested mesh or data parallelism, and eight answers about it: what
    else would fit, and what it would take. Each has the "question", the "answer" as lines of text, and its "data".
    ``analyze`` and ``inspect`` describe the plan itself."""
    explainer = _Explainer(request)
    answers = (
        ("What is the peak memory now, where and when?", explainer.peak),
        ("What is the largest batch?", explainer.batch),
        ("What is the longest sequence?", explainer.sequence),
        ("How many data-parallel ranks?", explainer.data_ranks),
        ("What does each ZeRO stage save, and cost?", lambda: explainer.vary("zero", range(4))),
        ("What does recomputation save?", lambda: explainer.vary("recompute", ("none", "attention", "block"))),
        ("How many micro-batches?", explainer.micro_batches),
        ("What does offloading save, and cost?", explainer.places),
    )
    return explainer.subject, [
        dict(zip(("question", "answer", "data"), (question, *answer()), strict=True)) for question, answer in answers
    ]


class _Explainer:
    """Answers questions about a plan, each by one method."""

    def __init__(self, request: Request) -> None:
        self.request, self.model, self.ranks = request, request.model, max(request.ranks)
        machine = request.machine.with_ranks(self.ranks)
        self.memory = request.limits.memory or machine.memory_of(0)
        fixed = {name: wanted for name, wanted in request.fixed.items() if name not in ("mesh", "stages")}
        axes = dict(request.fixed.get("mesh") or {"data": self.ranks})
        fixed.setdefault("micro_batches", 1)
        if axes.get("pipe", 1) > 1:
            fixed.setdefault("schedule", "1f1b")
        self.base = Candidate(tuple(axes.items()), request.batch_sizes[0], **fields_of(request.base), **fixed)
        self.costs = request.cost_model()
        self.evaluation = evaluate_plan(self.model, machine, self.base, request.base, **request.analyze_options)
        self.at_peak = self.evaluation.peak_step.peak

    @property
    def subject(self) -> str:
        """The explained plan, in one line."""
        request = self.request
        note = "" if request.fixed.get("mesh") else " (no --mesh: data parallelism)"
        return (
            f"{self.model.name}, {self.model.parameter_count:,} parameters in {request.dtype}, batch "
            f"{self.base.batch_size}, on {counted(self.ranks, 'rank')} of machine {request.machine.name}: {self.base}"
            f"{note}"
        )

    # --- common parts of answers

    def _estimate(self, costs: CostModel | None = None, **changes: Any) -> Estimate | None:
        """The estimate of the explained plan with these changes; None if the model cannot be sharded by them."""
        estimator = (costs or self.costs).estimator(replace(self.base, stages=None, **changes))
        return estimator.estimate() if estimator is not None else None

    def _fits(self, estimate: Estimate | None) -> bool:
        return estimate is not None and estimate.memory <= self.memory

    def _compare(self, changes: Mapping[Any, tuple[str, Mapping[str, Any]]]) -> tuple[list[str], dict[Any, Any]]:
        """A line for the plan with each of the ``changes``: key -> (name, fields of the candidate)."""
        lines, data = [], {}
        for key, (name, fields) in changes.items():
            estimate = self._estimate(**fields)
            data[key] = None
            text = "not possible"
            if estimate is not None:
                needs = f"{readable_bytes(estimate.memory)}, a step {readable_seconds(estimate.seconds)}"
                text = needs if self._fits(estimate) else f"{needs}, does not fit"
                data[key] = {"bytes": int(estimate.memory), "seconds": float(estimate.seconds)}
            lines.append(f"{name}: {text}")
        return lines, data

    def vary(self, name: str, options: Sequence[Any]) -> Answer:
        """The plan with each of several values of one field."""
        label, current = name.replace("_", " "), getattr(self.base, name)
        changes = {}
        for option in options:
            text = f"{label} {'nothing' if option is None else option}" + " (now)" * (option == current)
            changes[str(option)] = text, {name: option}
        return self._compare(changes)

    def _largest(self, fits: Callable[[int], bool], start: int, most: int) -> int:
        """The largest number from ``start`` on that fits, by doubling and bisection; 0 if none."""
        if not fits(start):
            return 0
        low = start
        while low * 2 <= most and fits(low * 2):
            low *= 2
        numbers = range(low, low * 2, max(start // 2, 1))
        return numbers[bisect_left(numbers, True, key=lambda number: not fits(number)) - 1]

    # --- the answers

    def peak(self) -> Answer:
        size = self.at_peak.bytes
        where = f"rank {self.evaluation.peak_rank}, at {self.evaluation.peak_step.peak_moment}"
        lines = [f"{readable_bytes(size)} on {where}", f"memory of a rank: {readable_bytes(self.memory)}"]
        return lines, {"bytes": size}

    def batch(self) -> Answer:
        parts = self.base.batch_ranks * self.base.micro_batches
        best = self._largest(lambda n: self._fits(self._estimate(batch_size=n * parts)), 1, MOST_BATCH) * parts
        smallest = self._estimate(batch_size=parts)
        needs = f"; that needs {readable_bytes(smallest.memory)}" if smallest is not None else ""
        text = f"{best} samples a step" if best else f"none: one sample per rank does not fit{needs}"
        return [f"{text}, in {readable_bytes(self.memory)} per rank"], best

    def sequence(self) -> Answer:
        most = self.model.context
        if "s" not in self.model.inputs.split() or not most:
            return ["the model has no sequence"], None

        def fits(length: int) -> bool:
            return self._fits(self._estimate(self.request.cost_model(length)))

        if fits(most):
            return [f"{most} tokens: the whole context fits"], most
        best = self._largest(fits, 16, most)
        return [f"{best} tokens of {most}" if best else "not even 16 tokens fit"], best

    def data_ranks(self) -> Answer:
        others = {axis: size for axis, size in self.base.axes if axis != "data"}
        most = min(self.costs.machine.ranks // prod(others.values()), self.base.batch_size // self.base.micro_batches)
        changes = {}
        for n in (1 << power for power in range(MOST_DOUBLINGS) if 1 << power <= most):
            axes = {"data": n} | others if n > 1 or not others else others
            changes[n] = f"data={n}", {"axes": tuple(axes.items())}
        lines, data = self._compare(changes)
        fewest = next((n for n, numbers in data.items() if numbers and numbers["bytes"] <= self.memory), None)
        return [*lines, f"the fewest that fit: {fewest}" if fewest else "none of these fits"], data

    def micro_batches(self) -> Answer:
        batch, ranks = self.base.batch_size, self.base.batch_ranks
        possible = [n for n in range(1, max(batch // ranks, 1) + 1) if batch % n == 0 and batch // n >= ranks]
        lines, data = self.vary("micro_batches", possible[:10])
        seconds = {key: plan["seconds"] for key, plan in data.items() if plan and plan["bytes"] <= self.memory}
        best = f"the quickest that fits: {min(seconds, key=seconds.__getitem__)}" if seconds else "none of these fits"
        return [*lines, best], data

    def places(self) -> Answer:
        node = self.request.machine.nodes[0]
        kinds = (None, "optimizer", "parameters", "activations", "optimizer,activations")
        lines, data = self.vary("offload", places_on(self.request.machine, self.base.zero, kinds))
        state = self.at_peak.bytes_by_kind.get("optimizer state", 0)
        disk = f"{node.disk_read / 1e9:.3g} GB/s read and {node.disk_write / 1e9:.3g} GB/s written on each node"
        return [f"optimizer state is {readable_bytes(state)} of the peak; the disk: {disk}", *lines], data
