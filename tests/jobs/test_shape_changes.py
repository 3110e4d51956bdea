"""A run changes its shape between steps, on all or some of its ranks, and computes what one rank computes."""

import gc
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spmd_engine import Mesh, TrainConfig, run_threads, train, world
from spmd_engine.adaptive import Reshaper, ShapeRequest
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.comm.other_ranks import OtherRanks
from spmd_engine.engine.reshape import PROTOCOLS
from spmd_engine.errors import UsageError
from spmd_engine.training import loss_scale
from support import saved
from support.on_ranks import numbers_of_ranks, on_ranks
from support.random_jobs import RandomJob, losses_in

CHANGES = 6  #: of a run, one after each step but the last two
TEXT_MODEL, EXPERTS, IMAGES, ADAPTERS, MLP = 3, 8, 1, 2, 5  #: seeds that draw jobs of these kinds


def job_of(seed, folder, **more):
    job = RandomJob(seed, folder)
    assert job.legs  # what is drawn next follows them
    job.steps = CHANGES + 2
    job.what |= {"steps": job.steps, "batch_size": 12, "micro_batches": 2, "eval_every": 3, "timeout": 60.0, **more}
    return job


def drawn_requests(job, ranks, joins=()):
    """A request after each of ``CHANGES`` steps: a mesh of some of the ranks, in any order, and options on it; one
    more rank after each step of ``joins``."""
    requests = {}
    for step in range(1, CHANGES + 1):
        ranks += step - 1 in joins
        count = int(job.rng.choice([n for n in (1, 2, 3, 4, 4) if n <= ranks]))
        axes, how = job._place(count)
        if axes.get("data", 1) > 1 and job.rng.integers(2):
            how |= {"shares": "data=" + ":".join(map(str, job.rng.integers(1, 4, axes["data"])))}
        how["rank_order"] = ",".join(map(str, np.random.default_rng(step).permutation(count)))
        others = job.rng.choice(np.arange(1, ranks), count - 1, replace=False)
        requests[step] = ShapeRequest({"mesh": axes, **how}, ranks=[0, *sorted(others.tolist())])
    return requests


def events(folder, *kinds):
    complete, _, _ = (folder / "events.jsonl").read_text().rpartition("\n")  # a run may be writing the next line
    lines = map(json.loads, complete.splitlines())
    return [line for line in lines if line["event"] in kinds]


def trained(job, run, ranks, requests, nodes=None, **options):
    """Train a job on ranks, the last of them first on the mesh, which change their shape by requests at steps."""
    axes, how = job._place(ranks)
    how["rank_order"] = ",".join(map(str, range(ranks)[::-1]))
    config = TrainConfig.of(**job.what | how | {"mesh": axes})
    return run_threads(lambda: train(config, run, propose=requests.get, **options), ranks, nodes=nodes)


def assert_same(run, alone):
    ours, theirs = losses_in(run), losses_in(alone)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose([*ours.values()], [*theirs.values()], rtol=1e-9)
    for what in saved.parameters, saved.state:
        found, expected = what(run), what(alone)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-8, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    "seed, nodes",
    [(EXPERTS, "abab")]
    + [(seed, "aaaa") for seed in (TEXT_MODEL, IMAGES, ADAPTERS)]
    + [(seed, "aabb") for seed in (0, 5, 6, 7, 11, 12, 14, 15, 16, 17, 18, 19)],
)
@pytest.mark.soak  # the shorter tests: changes of a run that continues, below, and with joins, of experts
def test_changes_change_no_result(tmp_path, seed, nodes):
    job = job_of(seed, tmp_path, save_every=4, check_replicas_every=1, save_in_background=True)
    if job.kind == "page":
        pytest.skip("a page shards itself")
    trained(job, tmp_path / "run", 4, drawn_requests(job, 4), list(nodes))
    trained(job, tmp_path / "alone", 1, {})
    assert len(events(tmp_path / "run", "reshaped")) >= 5, events(tmp_path / "run", "not reshaped")
    assert_same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize("ranks", numbers_of_ranks(mpi=(3,)))
def test_changes_on_mpi_ranks_change_no_result(ranks):
    def program():
        with Mesh() as mesh, tempfile.TemporaryDirectory() as mine:
            job = job_of(MLP, mine)
            size, folder = mesh.size, Path(text_from_rank_zero(mesh.group(), lambda: mine))
            requests, (axes, how) = drawn_requests(job, size), job._place(size)
            how["rank_order"] = ",".join(map(str, range(size)[::-1]))
            train(TrainConfig.of(**job.what | how | {"mesh": axes}), folder / "run", propose=requests.get)
            if mesh.rank == 0:
                assert len(events(folder / "run", "reshaped")) >= 5
                trained(job, folder / "alone", 1, {})
                assert_same(folder / "run", folder / "alone")
            mesh.barrier()

    on_ranks(program, ranks)


def test_a_killed_run_continues_exactly(tmp_path):
    """The run ends between two changes, as if killed: what it has not saved is done again, on another mesh."""
    job, nodes = job_of(MLP, tmp_path, save_every=3, check_replicas_every=1), list("abab")
    requests = drawn_requests(job, 4)

    def die(step):
        if step == 5:
            raise KeyboardInterrupt
        return requests[step]

    with pytest.raises(KeyboardInterrupt):
        trained(job, tmp_path / "run", 4, SimpleNamespace(get=die), nodes)
    before = losses_in(tmp_path / "run")
    trained(job, tmp_path / "run", 3, {4: ShapeRequest({"mesh": {"data": 2}})}, resume=True)
    trained(job, tmp_path / "alone", 1, {})
    assert [each["step"] for each in events(tmp_path / "run", "started")] == [0, 3]
    assert before.keys() == set(range(1, 5))
    assert_same(tmp_path / "run", tmp_path / "alone")


# --- what is refused

REFUSED = {
    "too few ranks": (ShapeRequest({"mesh": {"data": 8}}), "mesh data=8 needs 8 ranks; the job has 4"),
    "other ranks": (ShapeRequest({"mesh": {"data": 2}}, ranks=[0, 9]), "mesh data=2 needs 2 ranks; the job has 4"),
    "without rank 0": (ShapeRequest({"mesh": {"data": 2}}, ranks=[1, 2]), "ranks 1,2: name each once, and rank 0"),
    "another model": (ShapeRequest({"zero": 1}, model="gpt-mini"), "a shape for gpt-mini, and the run trains mlp"),
    "an unknown option": (ShapeRequest({"zeroo": 1}), "unknown field 'zeroo'; did you mean 'zero'"),
    "a value out of range": (ShapeRequest({"zero": 4}), "zero is 4: it must be from 0 to 3"),
    "an unknown axis": (ShapeRequest({"mesh": {"date": 4}}), "no customary layout for axis 'date'; did you mean"),
    "more stages than layers": (ShapeRequest({"mesh": {"pipe": 4}, "stages": "0,1,2,9"}), "stages"),
    "misfitting shares": (ShapeRequest({"mesh": {"data": 4}, "shares": "data=1:2"}), "it says 2 shares of data"),
    "a rank without samples": (ShapeRequest({"mesh": {"data": 4}, "shares": "data=90:1:1:1"}), "leave a rank none"),
    "experts of a model without any": (ShapeRequest({}, experts={"hidden": [0]}), "no layer has experts under this"),
    "the present shape": (ShapeRequest({"mesh": {"data": 4}}), "the job has this shape: mesh data=4"),
    "another result": (ShapeRequest({"compress": "bfloat16"}), "compress changes the results of a run"),
    "more ranks than there are": (ShapeRequest({"mesh": {"data": 10**30}}), "the product of the sizes is above 65536"),
    "a stage without ranks": (ShapeRequest({"mesh": {"pipe": 2, "model": [0, 3]}}), "sizes are whole numbers from 1"),
    "a part that is no list": (ShapeRequest({"zero": 1}, experts={"block0": 3}), "experts is {'block0': 3}"),
    "a part that is no number": (ShapeRequest({"zero": 1}, experts={"block0": ["a"]}), "experts is {'block0': ['a']}"),
    "a path with NUL": (ShapeRequest({"offload": "optimizer", "offload_dir": "a\0b"}), "it must have no NUL character"),
    "more chunks than layers": (
        ShapeRequest({"mesh": {"pipe": 4}, "schedule": "interleaved", "chunks": 10**18}),
        "few",
    ),
    "what is no JSON": (ShapeRequest({"zero": {1}}), "the request: TypeError: Object of type set"),
}


def small_job(folder, **options):
    job = RandomJob(MLP, folder)
    return TrainConfig.of(**job.what | {"steps": 4, "batch_size": 12, "mesh": {"data": 4}, "timeout": 60.0, **options})


def test_a_rank_that_was_idle_scales_the_loss_as_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "GROW_AFTER", 2)
    job = small_job(tmp_path, mesh={"data": 2}, steps=8, dtype="float16")
    requests = {2: ShapeRequest({"mesh": {"data": 1}}), 6: ShapeRequest({"mesh": {"data": 2}})}
    runs = run_threads(lambda: train(job, tmp_path / "run", propose=requests.get), 2)
    (scale,) = {run.trainer.loss_scale.value for run in runs}
    assert scale != loss_scale.LossScale().value


@pytest.mark.parametrize("protocol", ["stop-and-copy", "live"])
def test_a_change_after_a_skipped_first_step_changes_no_result(tmp_path, monkeypatch, protocol):
    """No step has been made with the optimizer's state yet, and the loss scale falls on, until gradients fit."""
    monkeypatch.setattr(loss_scale.LossScale.__init__, "__defaults__", (2.0**24, 0))
    how = {"dtype": "float16", "optimizer": "adamw", "learning_rate": 1e-3, "eval_every": 0}
    job = small_job(tmp_path, mesh={"data": 2}, steps=14, **how)
    request = ShapeRequest({"mesh": {"model": 2}}, protocol=protocol)
    runs = run_threads(lambda: train(job, tmp_path / "run", propose={1: request}.get), 2)
    (alone,) = run_threads(lambda: train(job.with_options(mesh={"data": 1}), tmp_path / "alone"), 1)
    assert [each["event"] for each in events(tmp_path / "run", "reshaped", "not reshaped")] == ["reshaped"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "skipped" in lines[0] and "skipped" in lines[1] and "skipped" not in lines[-1]
    assert {run.trainer.loss_scale.value for run in runs} == {alone.trainer.loss_scale.value}
    ours, theirs = losses_in(tmp_path / "run"), losses_in(tmp_path / "alone")
    np.testing.assert_allclose([*ours.values()], [*theirs.values()], rtol=5e-3)


def test_what_does_not_fit_is_refused_before_it_begins_and_the_run_continues(tmp_path):
    requests = [
        (replace(request, protocol=PROTOCOLS[number % len(PROTOCOLS)]), reason)
        for number, (request, reason) in enumerate(REFUSED.values())
    ]
    job = small_job(tmp_path, steps=len(requests) + 1, eval_every=0)
    run_threads(lambda: train(job, tmp_path / "run", propose=lambda step: requests[step - 1][0]), 4)
    answers = events(tmp_path / "run", "migrating", "reshaped", "not reshaped")
    for (_, reason), event in zip(requests, answers, strict=True):
        assert event["event"] == "not reshaped" and reason in event["why"] and "\n" not in event["why"], event
    assert json.loads((tmp_path / "run" / "config.json").read_text())["composition"]["mesh"] == {"data": 4}
    assert losses_in(tmp_path / "run").keys() == {*range(1, job.training.steps + 1)}


def test_an_error_on_one_rank_while_a_request_is_checked_is_a_refusal(tmp_path, monkeypatch):
    def failing(reshaper, shape, *args):
        if reshaper.world.rank == 1:
            raise MemoryError
        return check(reshaper, shape, *args)

    check = Reshaper._check
    monkeypatch.setattr(Reshaper, "_check", failing)
    run_threads(lambda: train(small_job(tmp_path), tmp_path / "run", propose={1: ShapeRequest({"zero": 1})}.get), 4)
    (event,) = events(tmp_path / "run", "reshaped", "not reshaped")
    assert event["why"] == "rank 1 of 4: the requested shape cannot be taken: MemoryError", event


def test_an_error_after_the_arrays_have_moved_ends_the_job(tmp_path, monkeypatch):
    """It is no refusal: the job is not as it was."""

    def failing(reshaper, shape, **options):
        move(reshaper, shape, **options)
        raise UsageError("no samples there")

    def program():
        with pytest.raises(UsageError, match="no samples there"):
            train(small_job(tmp_path), tmp_path / "run", propose={1: ShapeRequest({"zero": 1})}.get)

    move = Reshaper.move
    monkeypatch.setattr(Reshaper, "move", failing)
    run_threads(program, 4)
    assert not events(tmp_path / "run", "reshaped", "not reshaped")


def test_residues_of_compressed_gradients_have_no_place_on_another_mesh(tmp_path):
    job = small_job(tmp_path, compress="top-k:0.1")
    run_threads(lambda: train(job, tmp_path / "run", propose={1: ShapeRequest({"mesh": {"model": 4}})}.get), 4)
    (event,) = events(tmp_path / "run", "not reshaped")
    assert "compress top-k:0.1 keeps what it omits on each rank" in event["why"]


def test_a_shape_without_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("spmd_engine.engine.reshape.memory_here", lambda: 1 << 20)
    job = small_job(tmp_path, zero=3)
    run_threads(lambda: train(job, tmp_path / "run", propose={1: ShapeRequest({"zero": 0})}.get), 4)
    (event,) = events(tmp_path / "run", "not reshaped")
    assert "in the old and the new shape are" in event["why"] and "which has 1.00 MiB of memory" in event["why"]


@pytest.mark.parametrize("away, answer", [(None, "not reshaped"), ("optimizer", "reshaped")])
def test_what_is_offloaded_needs_no_memory(tmp_path, monkeypatch, away, answer):
    """Of AdamW in float64: 96 bytes a parameter on two replicas and two shards, and half of that in memory."""
    monkeypatch.setattr("spmd_engine.engine.offload.file._in_memory", lambda folder: "")
    job = small_job(tmp_path, mesh={"data": 2}, optimizer="adamw", offload=away, offload_dir=str(tmp_path))
    limit = 70 * job.model.build(job.composition).parameter_count
    monkeypatch.setattr("spmd_engine.engine.reshape.memory_here", lambda: limit)
    run_threads(lambda: train(job, tmp_path / "run", propose={1: ShapeRequest({"mesh": {"model": 2}})}.get), 2)
    assert [each["event"] for each in events(tmp_path / "run", "reshaped", "not reshaped")] == [answer]


def test_a_page_of_strategies_is_refused(tmp_path):
    job = TrainConfig.of(strategy="data-parallel", model="mlp", data=small_job(tmp_path).data.path, steps=3, mesh=None)
    run_threads(lambda: train(job, tmp_path / "run", propose={1: ShapeRequest({"zero": 1})}.get), 2)
    (event,) = events(tmp_path / "run", "not reshaped")
    assert "data-parallel shards itself: its shape cannot change" in event["why"]


def test_a_model_that_cannot_be_placed_leaves_all_as_it_was(tmp_path, monkeypatch):
    """One rank fails while the new arrays are made: all ranks keep the old shape."""
    from spmd_engine.engine import layered

    place, job = layered.EngineState, small_job(tmp_path)

    def failing(model, mesh, *args, **options):
        if mesh.rank == 2 and "model" in mesh.axes:
            raise UsageError("no room")
        return place(model, mesh, *args, **options)

    monkeypatch.setattr(layered, "EngineState", failing)
    requests = {1: ShapeRequest({"mesh": {"model": 4}}), 2: ShapeRequest({"mesh": {"pipe": 2}})}
    run_threads(lambda: train(job, tmp_path / "run", propose=requests.get), 4)
    refused, done = events(tmp_path / "run", "reshaped", "not reshaped")
    assert "rank 2 of 4: no room" in refused["why"] and done["before"] == "mesh data=4"
    run_threads(lambda: train(job.with_options(mesh={"data": 1}), tmp_path / "alone"), 1)
    assert_same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize(
    "content, reason",
    [
        ("{", "reshape.json"),
        ("[]", "it must be an object, {...}, not []"),
        ('{"ranks": [0]}', "the field 'composition' is missing"),
        ('{"composition": {}, "rank": 1}', "unknown field 'rank'; did you mean 'ranks'"),
        ('{"composition": {}, "ranks": ["a"]}', "ranks is ['a']"),
        ('{"composition": {}, "protocol": "lively"}', "protocol is 'lively'; did you mean 'live'?"),
    ],
)
def test_a_file_that_is_no_request_is_answered_and_removed(tmp_path, content, reason):
    file = tmp_path / "run" / ShapeRequest.FILE
    file.parent.mkdir()
    file.write_text(content)
    run_threads(lambda: train(small_job(tmp_path, mesh={"data": 1}, steps=2), tmp_path / "run"), 1)
    (event,) = events(tmp_path / "run", "not reshaped")
    assert event["step"] == 1 and reason in event["why"] and not file.exists()


def test_a_request_waits_until_traced_steps_are_done(tmp_path):
    file = tmp_path / "run" / ShapeRequest.FILE
    file.parent.mkdir()
    file.write_text('{"composition": {"mesh": {"model": 4}}, "id": "mine"}')
    run_threads(lambda: train(small_job(tmp_path, steps=6), tmp_path / "run", trace=2), 4)
    (event,) = events(tmp_path / "run", "reshaped", "not reshaped")
    assert (event["event"], event["step"], event["request"]) == ("reshaped", 4, "mine")
    assert json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]


# --- idle ranks, and what changes leave behind


def test_an_idle_rank_holds_nothing_and_is_taken_back(tmp_path):
    held, requests = [], {1: ShapeRequest({"mesh": {"data": 2}}, ranks=[0, 3]), 3: ShapeRequest({"mesh": {"data": 4}})}
    take = OtherRanks.take

    def observed(others, received):
        (changes,) = [each for each in gc.get_referrers(others) if isinstance(each, Reshaper)]
        engine, optimizer = changes.engine, changes.optimizer
        held.append((others.world.rank, engine.is_placed, dict(engine.gradients), any(optimizer.state.values())))
        return take(others, received)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OtherRanks, "take", observed)
        run_threads(lambda: train(small_job(tmp_path, zero=1), tmp_path / "run", propose=requests.get), 4)
    assert sorted(held) == [(1, False, {}, False), (2, False, {}, False)]
    assert [each["ranks"] for each in events(tmp_path / "run", "reshaped")] == [[0, 3], [0, 1, 2, 3]]


def test_an_order_for_idle_ranks_may_be_long():
    """As one with the parts of all experts of a large model is."""
    order = {"experts": {f"block{layer}": list(range(256)) for layer in range(64)}}

    def program():
        others = OtherRanks(world(), [1], 60.0)
        if world().rank:
            return others.take()
        others.wake(order)
        return order

    assert run_threads(program, 2) == [order, order]


def test_an_error_of_the_others_ends_an_idle_rank(tmp_path):
    """A loss that is not finite ends the run: the idle ranks raise the same error, so that all end with one line."""
    requests = {1: ShapeRequest({"mesh": {"data": 2}})}
    job = small_job(tmp_path, learning_rate=1e30, optimizer="sgd", grad_clip=0.0, max_skipped=0, steps=40, warmup=0)

    def program():
        with pytest.raises(UsageError, match="the loss is|the gradient's norm is"):
            train(job, tmp_path / "run", propose=requests.get)

    run_threads(program, 4)


def memory_here(kind):
    """KiB of this process's memory of a kind of ``smaps_rollup``."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(f"{kind}:"))


@pytest.mark.mpi(ranks=2)
def test_an_idle_rank_returns_its_memory_to_the_system(monkeypatch):
    """Parameters, gradients and two kinds of state in float64: 28 MiB."""
    move, returned = Reshaper.move, []

    def measured(reshaper, shape, **options):
        before = memory_here("Pss")
        move(reshaper, shape, **options)
        returned.append((before - memory_here("Pss")) / 1024)

    monkeypatch.setattr(Reshaper, "move", measured)
    with Mesh() as mesh, tempfile.TemporaryDirectory() as mine:
        what = {"data": RandomJob(5, mine).what["data"], "batch_size": 4, "length": 8, "eval_samples": 2, "sample": 0}
        job = TrainConfig.of(model="gpt-nano", dtype="float64", steps=3, eval_every=0, save_every=0, **what)
        folder = text_from_rank_zero(mesh.group(), lambda: mine)
        train(job, Path(folder) / "run", propose={1: ShapeRequest({"mesh": {"data": 1}})}.get)
        assert mesh.rank == 0 or 20 < returned[0] < 60
        mesh.barrier()


@pytest.mark.parametrize("few, many", [(5, 10), pytest.param(25, 75, marks=pytest.mark.soak)])
@pytest.mark.mpi(ranks=3)
def test_changes_leave_nothing_behind(few, many):
    """As many communicators, records and shared memory after more changes, and hardly more memory."""
    shapes = [
        ShapeRequest({"mesh": {"data": 3}, "zero": 3}),
        ShapeRequest({"mesh": {"model": 2}}),
        ShapeRequest({"mesh": {"pipe": 2}}, ranks=[0, 2]),
        ShapeRequest({"mesh": {"model": 3}, "zero": 0}),
        ShapeRequest({"mesh": {"data": 1}}),
    ]

    def left_after(changes, folder, job):
        job = job.with_options(steps=changes + 2, save_every=0, eval_every=0, mesh={"data": 3})
        train(job, folder, propose=lambda step: shapes[step % 5])
        gc.collect()
        comm: Any = world()
        own = mesh.group().connections.neighbours.own
        left = [len(comm._kept), len(comm.progress.activity._free), own.size - own.free]
        return left, memory_here("Private_Dirty")

    with Mesh() as mesh, tempfile.TemporaryDirectory() as mine:
        job, folder = small_job(mine), Path(text_from_rank_zero(mesh.group(), lambda: mine))
        before, private = left_after(few, folder / "a", job)
        after, more = left_after(many, folder / "b", job)
        assert after == before
        assert more - private < 4096  # KiB
        mesh.barrier()
