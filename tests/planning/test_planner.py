"""``plan`` as a whole: its plans keep the limits by the simulated step and not only by an estimate."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

import spmd_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import GPT_SIZES, GPTSize, gpt
from spmd_engine.models.lora import LoRAOptions
from spmd_engine.models.names import build_model
from spmd_engine.planning import analyze, plan
from spmd_engine.planning.machine.machine import Curve, Link, Machine, NodeKind, read_machine
from spmd_engine.planning.plan_result import Request
from spmd_engine.planning.planner import explain, find_plan, fixed_plan, planned_model
from spmd_engine.planning.search import plan_search
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.plan_search import PlanSearch, evaluate_plan
from spmd_engine.planning.search.search import Limits, gains
from spmd_engine.planning.search.search_space import Candidate, SearchSpace, candidates
from spmd_engine.planning.simulator.check_prediction import steps_of
from spmd_engine.units import readable_bytes

pytestmark = pytest.mark.usefixtures("few_evaluations")
EVALUATIONS = plan_search.EVALUATIONS
SMALL = gpt(replace(GPT_SIZES["gpt-nano"], layers=3), "small")


def request_for(memory=None):
    """On two ranks, by data parallelism alone: the fewest candidates that differ in time and in memory."""
    limits = Limits(memory=memory)
    return Request(SMALL, read_machine("a100"), [2], [8], limits=limits, axes=["data"], fallback=None)


@pytest.fixture
def all_evaluations(monkeypatch):
    """For tests in which few do not suffice."""
    monkeypatch.setattr(plan_search, "EVALUATIONS", EVALUATIONS)


@pytest.fixture(scope="module")
def unlimited_plan():
    return find_plan(request_for())


@pytest.fixture(scope="module")
def least():
    """Bytes of the plan that needs least, by its simulated step."""
    return find_plan(replace(request_for(), goal="memory")).evaluation.analysis.peak_bytes


@pytest.mark.parametrize("share", [0.93, pytest.param(0.7, marks=pytest.mark.soak)])
def test_the_plan_s_own_peak_is_within_the_limit(unlimited_plan, share):
    """A little less than what the quickest plan needs, so that its estimate may fit though its step does not."""
    limit = share * unlimited_plan.evaluation.analysis.peak_bytes
    result = find_plan(request_for(limit))
    assert result.conflict is not None or result.evaluation.analysis.peak_bytes <= limit


def test_the_plan_is_the_fastest_of_the_evaluated_ones(unlimited_plan):
    assert unlimited_plan.evaluation.seconds == min(each.seconds for each in unlimited_plan.search.best)


def test_all_shown_plans_are_simulated_and_none_is_faster(unlimited_plan):
    shown = [*unlimited_plan.search.best, *unlimited_plan.search.front]
    assert len(unlimited_plan.search.front) > 1 and all(each.simulated for each in shown)
    assert unlimited_plan.evaluation.seconds == min(each.seconds for each in shown)
    assert all(each["simulated"] for each in unlimited_plan.as_json()["front"])


def test_a_plan_that_only_the_simulation_finds_faster_is_chosen(all_evaluations, monkeypatch):
    """Four micro-batches, which estimates rank far behind: here their simulated step takes almost no time."""

    def quick(model, machine, candidate, *others, **options):
        evaluation = evaluate_plan(model, machine, candidate, *others, **options)
        return replace(evaluation, seconds=evaluation.seconds / 100) if candidate.micro_batches == 4 else evaluation

    monkeypatch.setattr("spmd_engine.planning.search.plan_search.evaluate_plan", quick)
    monkeypatch.setattr("spmd_engine.planning.search.plan_search.SHOWN_PLANS", 1)
    result = find_plan(request_for())
    assert result.plan.candidate.micro_batches == 4 and len(result.search.best) == 1


@pytest.mark.parametrize(
    ("ranks", "fixed"),
    [
        pytest.param(2, {"micro_batches": 2}, id="free", marks=pytest.mark.soak),
        pytest.param(2, {"micro_batches": 2, "zero": 1}, id="fixed"),
        pytest.param(4, {}, id="free on four", marks=pytest.mark.soak),
        pytest.param(4, {"zero": 1}, id="fixed on four", marks=pytest.mark.soak),
    ],
)
def test_reasons_compare_with_other_meshes(ranks, fixed):
    result = find_plan(replace(request_for(), axes=None, ranks=[ranks], fixed=fixed))
    mine = ",".join(f"{axis}={size}" for axis, size in result.plan.candidate.axes)
    assert result.plan.candidate.zero == fixed.get("zero", result.plan.candidate.zero)
    others = [reason for reason in result.reasons if reason.startswith(f"mesh {mine}, not ")]
    names = {"data parallelism", "ZeRO", "tensor parallelism", "a pipeline"}
    assert len(others) >= 2 and all(any(f"({name})" in reason for name in names) for reason in others)
    assert len([reason for reason in others if "that would take" in reason]) >= 2


def test_a_plan_for_a_model_that_a_config_describes(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    rest = {"intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 128, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **rest}))
    model = planned_model(str(tmp_path))
    matrices = 2 * 64 * 256 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert model.parameter_count == matrices + (2 * 2 + 1) * 64  # norms
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UsageError, match="config.json.*bert"):
        planned_model(str(tmp_path / "config.json"))


def test_reasons_for_an_interleaved_schedule_name_others():
    request = Request(
        build_model("gpt-nano"),
        read_machine("cpu").with_ranks(2),
        [2],
        [8],
        fixed={"schedule": "interleaved", "chunks": 2, "micro_batches": 4},
        axes=["pipe"],
    )
    result = find_plan(request)
    assert result.plan.candidate.schedule == "interleaved"
    assert any(reason.startswith("schedule interleaved, not") for reason in result.reasons)


def test_relaxations_have_the_needs_of_the_simulated_step():
    machine = read_machine("cpu").with_ranks(2)
    result = find_plan(Request(build_model("mlp"), machine, [2], [16], limits=Limits(memory=1024), fallback=None))
    assert result.conflict.relaxations["memory"][1].memory == result.nearest_evaluation.analysis.peak_bytes


def test_limits_that_nothing_keeps_are_shown_as_given(least):
    """The search tightens limits by the errors of estimates; the text shows the given ones."""
    result = find_plan(request_for(0.999 * least))
    text, _ = result.conflict.relaxations["memory"]
    assert text == f"memory {readable_bytes(least)} instead of {readable_bytes(0.999 * least)}"


def test_a_search_that_ran_out_of_time_does_not_report_that_nothing_fits(least):
    result = find_plan(replace(request_for(0.999 * least), seconds=0.0))
    assert result.as_json()["fits"] is None
    assert result.why_not.startswith("time ran out (--seconds 0): of ") and "is unknown" in result.why_not


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"axes": ["sideways"]}, "--axes: sideways shards nothing of small; choose from pipe, data, context, model"),
        ({"sequence": 129}, "--length 129: the context of small is 128; give at most that"),
        ({"seconds": -1.0}, "--seconds -1: it must be at least 0"),
        ({"fixed": {"chunks": 1, "schedule": "interleaved"}}, "--chunks 1: it must be at least 2, with interleaved"),
        ({"dtype": np.int8}, "plan: dtype is .*int8.*; there are: float32"),
    ],
    ids=["axes", "sequence", "seconds", "chunks", "dtype"],
)
def test_invalid_requests_are_errors(changes, message):
    with pytest.raises(UsageError, match=message):
        replace(request_for(), **changes)


def test_fixed_options_hold_in_every_candidate():
    """Also those that some meshes cannot have: sequence parallelism on one rank, two stages on one."""
    with pytest.raises(UsageError, match="and the fixed options"):
        find_plan(replace(request_for(), axes=None, ranks=[1], fixed={"sequence_parallel": True}))
    found = find_plan(replace(request_for(), axes=["data", "pipe"], fixed={"stages": (0, 4)})).plan.candidate
    assert found.mesh == {"pipe": 2} and found.stages == (0, 4)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("99999", "stages 99999: 1 ascending numbers are needed, the first of them 0"),
        ([2, 4], "stages 2,4: 2 ascending numbers"),
        (3, "stages 3: 1 ascending"),
        ("cost", "--stages cost: stages are planned; give --mesh as well"),
    ],
)
def test_stages_that_are_no_division_of_the_layers_are_refused(stages, message):
    with pytest.raises(UsageError, match=message):
        find_plan(replace(request_for(), fixed={"stages": stages}))


def test_plan_from_python_evaluates_a_given_mesh():
    result = spmd_engine.plan("mlp", mesh={"data": 2}, machine="cpu", memory="1KiB")
    assert result.plan is None and "memory at most 1.00 KiB" in result.why_not
    assert spmd_engine.plan("mlp", mesh={"data": 2}, machine="cpu").composition.mesh == {"data": 2}
    with pytest.raises(UsageError, match="plan needs ranks, or a mesh"):
        spmd_engine.plan("mlp")


def test_a_composition_whose_ranks_have_no_samples_is_refused():
    with pytest.raises(UsageError, match="fewer than the 7 rank"):
        fixed_plan(replace(request_for(), ranks=[7], fixed={"mesh": {"data": 7}}, batch_sizes=[3]))


def test_a_sequence_is_sharded_where_an_axis_is_named():
    found = {each.axes for each in candidates(SearchSpace(SMALL, [2], [8], 8, axes=["context"]))}
    assert found == {(("context", 2),)}


def test_a_plan_keeps_the_options_that_it_does_not_search_and_its_command_has_them():
    base = ParallelConfig(context_method="ulysses", compress="bfloat16", group_cap=1 << 20)
    fixed = {"mesh": {"context": 2}, "micro_batches": 1, "zero": 0, "recompute": "none"}
    result = find_plan(Request(SMALL, read_machine("a100"), [2], [8], base=base, fixed=fixed))
    composition = result.plan.candidate.composition(base)
    assert (composition.context_method, composition.compress) == ("ulysses", "bfloat16")
    words = "--context-method ulysses", "--compress bfloat16", "--group-cap 1048576"
    assert all(word in result.command for word in words), result.command


def test_the_command_of_a_plan_has_the_optimizer_the_length_and_the_adapters():
    fixed = {"micro_batches": 1, "zero": 0, "recompute": "none"}
    lora = LoRAOptions(rank=4, targets="c_attn,c_proj")
    request = Request(SMALL, read_machine("a100"), [1], [8], fixed=fixed, sequence=8, optimizer="sgd", lora=lora)
    command = find_plan(request).command
    assert command.endswith(" --optimizer sgd --length 8 --lora-rank 4 --lora-targets c_attn,c_proj"), command


def test_a_plan_that_just_fits_is_found(least):
    """Though its estimate is a little above what its step needs."""
    assert find_plan(request_for(least)).evaluation.analysis.peak_bytes == least


def test_a_trace_ends_with_its_last_step():
    def event(name, ts):
        return {"ph": "X", "pid": 0, "name": name, "ts": ts, "dur": 1, "cat": "compute"}

    names = ["a forward", "a backward (weights)", "all_gather over data (parameters)"]
    step = [event(name, ts) for ts, name in enumerate(names)]
    after = [event("all_gather over data (metrics)", 3), event("a forward", 4), event("all_reduce over data (loss)", 5)]
    assert steps_of({"traceEvents": [*step, *after]})["traceEvents"] == step


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate((("data", 16),), 32, 1, zero=3),
        pytest.param(Candidate((("data", 16),), 32, 2, zero=2), marks=pytest.mark.soak),
        pytest.param(Candidate((("data", 16),), 32, 1, zero=3, recompute="block"), marks=pytest.mark.soak),
        Candidate((("pipe", 2), ("data", 8)), 32, 4, zero=1, schedule="1f1b"),
    ],
    ids=str,
)
def test_estimates_are_near_the_simulated_step(candidate):
    model, machine = build_model("gpt2"), read_machine("a100").with_ranks(16)
    estimate = CostModel(model, machine).estimator(candidate).estimate()
    evaluation = evaluate_plan(model, machine, estimate.candidate, ParallelConfig(), dtype=np.float32)
    assert estimate.seconds == pytest.approx(evaluation.seconds, rel=0.08)
    assert estimate.sent == pytest.approx(evaluation.bytes_sent, rel=0.02)
    assert estimate.memory == pytest.approx(evaluation.analysis.peak_bytes, rel=0.05)


@pytest.mark.parametrize(
    "candidate",
    [Candidate((("pipe", 2),), 4, 4, schedule="1f1b"), Candidate((("data", 2),), 2, 1, zero=1)],
    ids=["messages between stages", "gathered parameters"],
)
def test_estimates_count_communication_that_is_most_of_a_step(candidate):
    """Most bytes are messages between stages; or most of the time is the gather of updated parameters."""
    model = gpt(GPTSize(layers=2, width=256, heads=2, context=16, vocabulary=16))
    node = NodeKind("node", 2, 1, {"float32": Curve.flat(1e12)}, 1e10, Curve.flat(1e12), Link(1e-6, 1e10))
    machine = Machine("far apart", (node,), Link(1e-6, 1e8))
    estimate = CostModel(model, machine).estimator(candidate).estimate()
    evaluation = evaluate_plan(model, machine, estimate.candidate, ParallelConfig(), dtype=np.float32)
    assert estimate.sent == pytest.approx(evaluation.bytes_sent, rel=0.01)
    if candidate.zero:
        assert estimate.seconds == pytest.approx(evaluation.seconds, rel=0.2)


def test_a_file_of_a_gpt_s_sizes_is_a_model(tmp_path):
    file = tmp_path / "odd.toml"
    file.write_text("layers = 3\nwidth = 66\nheads = 6\ncontext = 37\nepsilon = 1e-6\n")
    model = planned_model(str(file))
    assert (model.name, model.context, len(model.layers)) == ("odd", 37, 10)
    file.write_text(file.read_text().replace("1e-6", "0.0"))
    with pytest.raises(UsageError, match=r"odd.toml: epsilon is 0.0: it must be from 1e-30"):
        planned_model(str(file))


@pytest.mark.parametrize("name", [pytest.param("gpt-nano", marks=pytest.mark.soak), "gpt-moe-nano"])
def test_eight_questions_are_answered(name):
    limits = Limits(memory=30 * 2**20)
    subject, answers = explain(Request(build_model(name), read_machine("a100"), [4], [16], limits=limits))
    assert subject.startswith(f"{name}, ") and "batch 16, on 4 ranks of machine a100: data=4 (no --mesh" in subject
    assert len(answers) == len({each["question"] for each in answers}) == 8
    assert all(each["answer"] for each in answers)
    json.dumps(answers)
    by_question = {each["question"]: each["data"] for each in answers}
    analysis = analyze(ModelConfig(name), {"data": 4}, batch_size=16, device="cuda")
    peak = replace(analysis, tables=()).peak_bytes  # ranks with devices of their own hold no slot tables
    assert by_question["What is the peak memory now, where and when?"] == {"bytes": peak}


def described(html):
    """The text of a piece of HTML, which must be well formed."""
    return " ".join(ElementTree.fromstring(f"<div>{html}</div>").itertext())


def test_a_plan_shows_itself(all_evaluations):
    options = {"machine": "cpu", "batch_size": 8}
    found = described(plan(ModelConfig("two-layers").build(ParallelConfig()), ranks=2, **options)._repr_html_())
    assert "python -m spmd_engine train --model" in found and "the step, as predicted" in found
    given = described(plan("two-layers", mesh={"data": 2}, **options)._repr_html_())
    assert "data=2" in given and "the step, as predicted" in given
    refused = described(plan("two-layers", ranks=1, memory="1KiB", **options)._repr_html_())
    assert "memory at most 1.00 KiB cannot be kept" in refused


def test_the_closest_plan_is_that_of_the_limit_that_cannot_be_kept():
    machine = read_machine("cpu").with_ranks(2)
    result = find_plan(Request(build_model("mlp"), machine, [2], [16], limits=Limits(latency=1e-5), fallback=None))
    text, way = result.conflict.relaxations["latency"]
    assert list(result.conflict.constraints) == ["latency"] and result.nearest_evaluation.seconds == way.seconds
    assert f"({way.candidate}) needs {text.split()[1]} ms of latency. It would fit with {text}" in result.why_not
    given = plan("mlp", mesh={"data": 2}, latency=1e-5, machine=machine).why_not
    assert (
        "latency at most 10 us and mesh data=2 cannot be kept together; it needs" in given and "latency" in given[-12:]
    )


def test_the_closest_plan_of_a_search_without_time_exceeds_its_limit_least():
    machine, limits = read_machine("cpu").with_ranks(2), Limits(compute=1e-5)
    request = Request(build_model("mlp"), machine, [2], [16], limits=limits, fallback=None, seconds=0)
    search = PlanSearch(request)
    nearest = search.run().conflict.nearest
    others = [Candidate((("pipe", 2),), 16, schedule="zero-bubble", micro_batches=n) for n in (2, 16)]
    assert all(limits.excess(nearest) < limits.excess(search.plan(each)) for each in others)


@pytest.mark.parametrize(
    "limits", [{"compute": 1e-5}, pytest.param({"bandwidth": 1.0}, marks=pytest.mark.soak)], ids=str
)
def test_the_relaxation_of_a_limit_is_the_smallest_of_all_plans(all_evaluations, limits):
    machine, limits = read_machine("cpu").with_ranks(2), Limits(**limits)
    request = Request(build_model("mlp"), machine, [2], [4], limits=limits, fallback=None)
    (name,) = limits.names
    _, way = PlanSearch(request).run().conflict.relaxations[name]
    every = PlanSearch(request)
    plans = [every.simulated(plan) for c in candidates(every.space) if (plan := every.estimate(c)) is not None]
    assert limits.excess(way) <= min(map(limits.excess, plans)) * 1.05  # it is the smallest by estimates


def test_an_alternative_is_compared_by_what_is_known_of_both_plans():
    plain, other = Candidate((("data", 2),), 8, 1), Candidate((("model", 2),), 8, 1)
    closed = Estimate(plain, seconds=2.0, memory=10, sent=4.0, parts={"work": 1.0})
    chosen = replace(closed, seconds=1.0, sent=8.0, closed=closed)
    estimate = Estimate(other, seconds=1.0, memory=10, sent=6.0, parts={"work": 1.0})
    request = replace(request_for(), goal="communication")
    (by_estimates,) = gains(request, Limits(), chosen, {}, [("mesh", estimate)])
    assert "send +50.0% bytes, take -50.0% time" in by_estimates and by_estimates.endswith("(by estimates of both)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": "2"}, "plan: ranks is '2'; give a whole number"),
        ({"ranks": 0}, "plan: ranks is 0; it must be from 1"),
        ({"ranks": 10**12, "machine": "a100"}, "machine a100 has 1048576 ranks, fewer than 1000000000000"),
        ({"ranks": 2, "batch_size": []}, "plan: batch_size is empty; give a whole number"),
        ({"mesh": "data=2"}, "plan: mesh is 'data=2'; give axes with their sizes"),
        ({"model": 3, "ranks": 2}, "plan: model is 3; give a Model, or its name"),
        ({"ranks": 2, "batch_size": "x"}, "plan: batch_size is 'x'; give a whole number"),
        ({"ranks": 2, "fixed": ["zero"]}, "plan: fixed is a list of 1; give choices by name"),
        ({"ranks": 2, "fixed": {"zeroo": 3}}, "fixed choice 'zeroo': did you mean 'zero'"),
        ({"ranks": 2, "fixed": {"zero": 7}}, "zero is 7: it must be from 0 to 3"),
        ({"ranks": 2, "base": {}}, "plan: base is a dict; give a ParallelConfig"),
        ({"ranks": 2, "seconds": "x"}, "plan: seconds is 'x'; give a number"),
        ({"ranks": 2, "dtype": "int7"}, "plan: dtype is 'int7'; there are: float32"),
        ({"ranks": 2, "sequence": -5}, "--length -5: it must be from 1"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        plan(**{"model": "mlp", **options})
