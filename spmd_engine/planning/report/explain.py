"""``plan explain``: answers to common questions about memory and time, from dry runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from spmd_engine.engine.parallel_config import composed_assignment
from spmd_engine.models import layout_for
from spmd_engine.planning.dry_run.match_calls import position_of
from spmd_engine.planning.report.plan_result import Request
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.layer_costs import LayerCosts
from spmd_engine.planning.search.plan_evaluation import PlanEvaluation, evaluate_plan
from spmd_engine.planning.search.search import Planner
from spmd_engine.planning.search.search_space import Candidate
from spmd_engine.sharding.groups import ParameterGroup
from spmd_engine.units import readable_bytes, readable_seconds

MOST_BATCH = 1 << 20
MOST_DOUBLINGS = 12


@dataclass(frozen=True)
class Explanation:
    """A question with its answer, as lines of text and as data."""

    question: str
    lines: Sequence[str]
    data: Any

    def as_json(self) -> dict[str, Any]:
        return {"question": self.question, "answer": list(self.lines), "data": self.data}


def explain(request: Request) -> tuple[str, list[Explanation]]:
    """The plan that is explained, and fourteen answers about it: the given mesh or, without one, data parallelism."""
    explainer = _Explainer(request)
    return explainer.subject, list(explainer.answers())


class _Explainer:
    def __init__(self, request: Request) -> None:
        self.request, self.model = request, request.model
        self.ranks = max(request.ranks)
        self.machine = request.machine.with_ranks(self.ranks)
        self.memory = request.limits.memory or self.machine.memory_of(0)
        fixed = {name: wanted for name, wanted in request.fixed.items() if name not in ("mesh", "stages")}
        axes = dict(request.fixed.get("mesh") or {"data": self.ranks})
        fixed.setdefault("micro_batches", 1)
        if axes.get("pipe", 1) > 1:
            fixed.setdefault("schedule", "1f1b")
        self.base = Candidate(tuple(axes.items()), request.batch_sizes[0], **fixed)
        self.planner = self._planner(request.sequence)
        self.now = self._estimate(self.base)
        self.evaluation: PlanEvaluation = evaluate_plan(
            self.model, self.machine, self.base, request.base, **request.analyzed
        )

    @property
    def subject(self) -> str:
        """The plan that is explained, in one line."""
        request = self.request
        given = "" if request.fixed.get("mesh") else " (no --mesh: data parallelism)"
        return (
            f"{self.model.name}, {self.model.parameter_count:,} parameters in {request.dtype}, batch "
            f"{self.base.batch_size}, on {self.ranks} ranks of machine {request.machine.name}: {self.base}{given}"
        )

    def _planner(self, sequence: int | None) -> Planner:
        request = self.request
        return Planner(
            self.model,
            request.machine.with_ranks(min(self.ranks * 8, request.machine.ranks or self.ranks * 8)),
            dtype=request.dtype,
            sequence=sequence,
            optimizer=request.analyzed["optimizer"],
            base=request.base,
        )

    def _estimate(self, candidate: Candidate, planner: Planner | None = None) -> Estimate | None:
        estimator = (planner or self.planner).estimator(replace(candidate, stages=None))
        return estimator.estimate() if estimator is not None else None

    def answers(self) -> Iterator[Explanation]:
        yield self._peak()
        yield self._contents()
        yield self._batch()
        yield self._sequence()
        yield self._data_ranks()
        yield self._varied("What does each ZeRO stage save, and cost?", "zero", range(4))
        yield self._varied("What does recomputation save?", "recompute", ("none", "attention", "block"))
        yield self._micro_batches()
        yield self._largest_group()
        yield self._module()
        yield self._hybrid()
        yield self._sixteen_bits()
        yield self._offload()
        yield self._whole()

    def _priced(self, candidate: Candidate, estimate: Estimate | None) -> tuple[str, dict | None]:
        if estimate is None:
            return "not possible", None
        fits = "" if estimate.memory <= self.memory else ", does not fit"
        text = f"{readable_bytes(estimate.memory)}, a step {readable_seconds(estimate.seconds)}{fits}"
        return text, {"bytes": int(estimate.memory), "seconds": float(estimate.seconds)}

    def _peak(self) -> Explanation:
        peak = self.evaluation.peak_step.peak
        line = f"{readable_bytes(peak.bytes)} on rank {self.evaluation.peak_rank}, at {self.evaluation.peak_moment}"
        room = f"memory of a rank: {readable_bytes(self.memory)}"
        return Explanation("What is the peak memory now, where and when?", [line, room], {"bytes": peak.bytes})

    def _contents(self) -> Explanation:
        peak = self.evaluation.peak_step.peak
        kinds = sorted(peak.bytes_by_kind.items(), key=lambda entry: -entry[1])
        lines = [f"{readable_bytes(size):>12}  {kind}" for kind, size in kinds if size]
        lines += [f"{readable_bytes(size):>12}  of which {kind}, {what}" for kind, what, size in peak.holds[:4]]
        return Explanation("What is in it?", lines, dict(kinds))

    def _largest(self, fits, start: int, most: int) -> int:
        """The largest number from ``start`` on that fits, by doubling and bisection; 0 if none."""
        if not fits(start):
            return 0
        low, high = start, start * 2
        while high <= most and fits(high):
            low, high = high, high * 2
        while high - low > max(start // 2, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _batch(self) -> Explanation:
        cut = self.base.batch_ranks * self.base.micro_batches

        def fits(parts: int) -> bool:
            found = self._estimate(replace(self.base, batch_size=parts * cut))
            return found is not None and found.memory <= self.memory

        best = self._largest(fits, 1, MOST_BATCH) * cut
        one = self._estimate(replace(self.base, batch_size=cut))
        needs = f"; that needs {readable_bytes(one.memory)}" if one is not None else ""
        text = f"{best} samples a step" if best else f"none: one sample per rank does not fit{needs}"
        return Explanation("What is the largest batch?", [f"{text}, in {readable_bytes(self.memory)} per rank"], best)

    def _sequence(self) -> Explanation:
        question = "What is the longest sequence?"
        if "s" not in self.model.inputs.split() or not self.model.context:
            return Explanation(question, ["the model has no sequence"], None)
        most = self.model.context

        def fits(length: int) -> bool:
            found = self._estimate(self.base, self._planner(length))
            return found is not None and found.memory <= self.memory

        if fits(most):
            return Explanation(question, [f"{most} tokens: the whole context fits"], most)
        best = self._largest(fits, 16, most)
        return Explanation(question, [f"{best} tokens of {most}" if best else "not even 16 tokens fit"], best)

    def _data_ranks(self) -> Explanation:
        lines, data, fewest = [], {}, None
        rest = {axis: size for axis, size in self.base.axes if axis != "data"}
        for power in range(MOST_DOUBLINGS):
            n = 1 << power
            ranks = n * prod(rest.values())
            if ranks > self.planner.machine.ranks or self.base.batch_size // self.base.micro_batches < n:
                break
            axes = tuple((({"data": n} | rest) if n > 1 or not rest else rest).items())
            text, numbers = self._priced(self.base, self._estimate(replace(self.base, axes=axes)))
            lines.append(f"data={n}: {text}")
            data[n] = numbers
            if numbers and numbers["bytes"] <= self.memory and fewest is None:
                fewest = n
        lines.append(f"the fewest that fit: {fewest}" if fewest else "none of these fits")
        return Explanation("How many data-parallel ranks?", lines, data)

    def _varied(self, question: str, name: str, options: Sequence[Any]) -> Explanation:
        lines, data = [], {}
        for option in options:
            text, numbers = self._priced(self.base, self._estimate(replace(self.base, **{name: option})))
            mark = " (now)" if getattr(self.base, name) == option else ""
            lines.append(f"{name.replace('_', ' ')} {option}{mark}: {text}")
            data[str(option)] = numbers
        return Explanation(question, lines, data)

    def _micro_batches(self) -> Explanation:
        per_rank = max(self.base.batch_size // self.base.batch_ranks, 1)
        numbers = [
            n
            for n in range(1, per_rank + 1)
            if self.base.batch_size % n == 0 and self.base.batch_size // n >= self.base.batch_ranks
        ]
        found = self._varied("How many micro-batches?", "micro_batches", numbers[:10])
        fitting = {n: each for n, each in found.data.items() if each and each["bytes"] <= self.memory}
        best = min(fitting, key=lambda n: fitting[n]["seconds"]) if fitting else None
        return replace(found, lines=[*found.lines, f"the quickest that fits: {best}" if best else "none of these fits"])

    def _groups(self):
        place = position_of(0, self.base.mesh)
        layout = layout_for(self.model, place, sequence_parallel=self.base.sequence_parallel)
        composition = self.base.composition(self.request.base)
        return composed_assignment(self.model, place, layout, self.planner.itemsize, composition).groups

    def _largest_group(self) -> Explanation:
        groups = sorted(self._groups(), key=lambda group: -group.size)[:5]
        sizes = {_members(group): group.size * self.planner.itemsize for group in groups}
        lines = [f"{readable_bytes(size):>12}  {name}" for name, size in sizes.items()]
        return Explanation("Which unsharded parameter group is largest?", lines, sizes)

    def _module(self) -> Explanation:
        of_layers, _ = self.planner.profiles.costs(self.base)
        costs = [replace(cost, name=name) for cost, (name, _) in zip(of_layers, self.model.layers, strict=True)]

        def total(cost: LayerCosts) -> float:
            return cost.parameters * self.planner.itemsize * 4 + cost.saved + cost.above_backward

        lines, data = [], {}
        for cost in sorted(costs, key=total, reverse=True)[:4]:
            size = total(cost)
            data[cost.name] = int(size)
            lines.append(
                f"{cost.name}: {readable_bytes(size)} with gradient and state, including "
                f"{readable_bytes(cost.saved)} saved for the backward, {readable_bytes(cost.above_backward)} during it"
            )
        if self.ranks > 1:
            axes = tuple({**{a: n for a, n in self.base.axes if a != "data"}, "model": self.ranks}.items())
            if prod(n for _, n in axes) == self.ranks:
                text, _ = self._priced(self.base, self._estimate(replace(self.base, axes=axes)))
                lines.append(f"all sharded by tensor parallelism, model={self.ranks}: {text}")
        return Explanation("Which module should be sharded?", lines, data)

    def _hybrid(self) -> Explanation:
        question = "When does hybrid sharding pay?"
        if self.ranks < 4 or set(self.base.mesh) - {"data", "replicate", "shard"}:
            return Explanation(question, ["from four data-parallel ranks on"], None)
        lines, data = [], {}
        shard = 1
        while shard <= self.ranks:
            if self.ranks % shard == 0:
                axes = {"replicate": self.ranks // shard, "shard": shard}
                axes = {axis: n for axis, n in axes.items() if n > 1}
                text, numbers = self._priced(
                    self.base, self._estimate(replace(self.base, axes=tuple(axes.items()), zero=3 if shard > 1 else 0))
                )
                name = ",".join(f"{axis}={n}" for axis, n in axes.items())
                lines.append(f"{name}: {text}")
                data[name] = numbers
            shard *= 2
        fitting = {name: each for name, each in data.items() if each and each["bytes"] <= self.memory}
        if fitting:
            best = min(fitting, key=lambda name: fitting[name]["seconds"])
            lines.append(f"the quickest that fits: {best}")
        return Explanation(question, lines, data)

    def _sixteen_bits(self) -> Explanation:
        totals = self.evaluation.analysis.totals()
        gradients = sum(
            sent for (operation, _), (_, sent) in totals.items() if operation in ("all_reduce", "reduce_scatter")
        )
        lines = [
            f"reductions send {readable_bytes(gradients)} per step over all ranks; --compress bfloat16 halves the "
            "part of gradients",
        ]
        return Explanation("Should gradients be reduced in 16 bits?", lines, gradients)

    def _offload(self) -> Explanation:
        peak = self.evaluation.peak_step.peak
        state = peak.bytes_by_kind.get("optimizer state", 0)
        part = self._estimate(replace(self.base, zero=1))
        saved = self.now.memory - part.memory if part and self.now else 0
        lines = [
            f"optimizer state is {readable_bytes(state)} of the peak; the engine does not offload",
            f"ZeRO-1 saves {readable_bytes(max(saved, 0))} of it without offloading",
        ]
        return Explanation("What would offloading of optimizer state save?", lines, state)

    def _whole(self) -> Explanation:
        groups = self._groups()
        n = prod(size for _, size in self.base.axes)
        whole = [group for group in groups if not group.summed.cut]
        size = sum(group.size for group in whole) * self.planner.itemsize
        lines = [
            f"{len(whole)} of {len(groups)} parameter groups, {readable_bytes(size)}, are stored whole on each "
            f"rank that uses them, of {n} ranks"
        ]
        names = [member.name for group in whole for member in group.members][:6]
        lines += [f"for example {', '.join(names)}"] if names else []
        return Explanation("What is not sharded in storage?", lines, size)


def _members(group: ParameterGroup) -> str:
    """The content of a parameter group, by its largest parameter."""
    largest = max(group.members, key=lambda member: member.size)
    others = len(group.members) - 1
    return f"{group.name}: {largest.name}" + (f" and {others} more" if others else "")
