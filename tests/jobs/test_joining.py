"""Ranks of a second launcher join a running job, between two steps, and the job computes what one rank computes."""

import json
import os
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_shape_changes import (
    ADAPTERS,
    EXPERTS,
    IMAGES,
    TEXT_MODEL,
    assert_same,
    drawn_requests,
    events,
    job_of,
    small_job,
    trained,
)

from spmd_engine import TrainConfig, run_threads, train
from spmd_engine.adaptive import ShapeRequest
from spmd_engine.adaptive.joining import Entrance, JoinRequest, JoinRequests, LockedFile, facts_of, runs
from spmd_engine.arrays.products import NUMPY, in_use
from spmd_engine.checkpoints.format.folder import RunLock
from spmd_engine.comm.communicators.threads import current_thread_communicator, solo
from spmd_engine.errors import UsageError
from spmd_engine.jobs import join, run_job
from spmd_engine.planning.machine import product_choice
from spmd_engine.training import Trainer, loss_scale, workload
from support.random_jobs import losses_in


@contextmanager
def joining_ranks(folder, *groups, **options):
    """While open, groups of virtual ranks, (number, request), join the run in the folder, one after the other."""
    outcomes = [None] * len(groups)

    def start():
        for number, (ranks, request) in enumerate(groups):
            begun(folder)
            thread = threading.Thread(target=run_group, args=(number, ranks, request), daemon=True)
            thread.start()
            threads.append(thread)
            while thread.is_alive() and len(events(folder, "joined")) <= number:
                time.sleep(0.01)

    def run_group(number, ranks, request):
        try:
            outcomes[number] = run_threads(lambda: join(folder, request, wait=60.0, **options), ranks)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=start, daemon=True)]
    threads[0].start()
    yield outcomes
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def joins_after(monkeypatch):
    """``joins_after(steps)``: ranks join the job just after these steps, however long they take to ask for it."""

    def set_steps(*steps):
        is_ready = JoinRequests.is_ready

        def at_these_steps(joining, world):
            path = joining._folder / "metrics.jsonl"
            step = path.read_text().count("\n") + 1
            if step not in steps or path.parent.name == "alone":
                return False
            until = time.monotonic() + 60
            while not is_ready(joining, world):
                assert time.monotonic() < until
                time.sleep(0.01)
            return True

        monkeypatch.setattr(JoinRequests, "is_ready", at_these_steps)

    return set_steps


def begun(folder):
    """Wait until a run in the folder can be joined."""
    while not (folder / "events.jsonl").exists() or not runs(folder):
        time.sleep(0.01)


OWN = """
from spmd_engine.models import mlp


def classifier():
    return mlp((5, 6, 3), "classifier")
"""


@pytest.fixture
def own_job(tmp_path, monkeypatch):
    """A job of the user's own code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "joined_code.py").write_text(OWN)
    np.savez("data.npz", x=np.ones((64, 5)), y=np.zeros(64, int))
    yield TrainConfig.of(model="joined_code.py:classifier", data="data.npz", steps=6, eval_every=0, sample=0)
    sys.modules.pop("joined_code", None)


def test_ranks_join_a_job_of_the_user_s_code_if_it_is_permitted(own_job, tmp_path, joins_after):
    joins_after(3)
    with joining_ranks(tmp_path / "run", (1, None), permit=lambda model: model.changed(name=model.name)) as outcomes:
        run_threads(lambda: train(own_job, tmp_path / "run"), 1)
    assert isinstance(outcomes[0], list), outcomes
    (each,) = events(tmp_path / "run", "joined")
    assert each["ranks"] == [1]


@pytest.mark.parametrize(
    "seed", [EXPERTS, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (TEXT_MODEL, IMAGES, ADAPTERS, 7, 12))]
)
def test_random_changes_and_two_joins_change_no_result(tmp_path, joins_after, seed):
    """Two ranks, then three, then four; the first join also changes the shape, and the second waits idle for one."""
    job = job_of(seed, tmp_path, save_every=4, check_replicas_every=1, save_in_background=True)
    joins_after(2, 4)
    axes, how = job._place(3)
    first = ShapeRequest({"mesh": axes, **how}, ranks=[0, 1, 2])
    requests = drawn_requests(job, 2, joins=(2, 4))
    axes, how = job._place(4)
    requests[5] = ShapeRequest({"mesh": axes, **how})
    with joining_ranks(tmp_path / "run", (1, first), (1, None)) as outcomes:
        trained(job, tmp_path / "run", 2, requests)
    trained(job, tmp_path / "alone", 1, {})
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
    assert [(each["step"], each["ranks"]) for each in events(tmp_path / "run", "joined")] == [(2, [2]), (4, [3])]
    reshaped = events(tmp_path / "run", "reshaped")
    assert len(reshaped) >= 4 and reshaped[-2]["ranks"] == [0, 1, 2, 3], reshaped
    assert_same(tmp_path / "run", tmp_path / "alone")
    assert not list((tmp_path / "run").glob("join*"))


def test_a_rank_joins_a_run_with_a_helper_rank_and_helps_in_turn(tmp_path, joins_after):
    """The helper rank goes on while the worlds merge, and is then taken onto the mesh."""
    job = job_of(EXPERTS, tmp_path)
    config = TrainConfig.of(**job.what | {"mesh": {"data": 1}})
    layer = config.model.build(config.composition).layers[-1][0].split("/")[0]
    joins_after(2)
    requests = {4: ShapeRequest({"mesh": {"data": 2}, "assign": f"{layer}:rank2"})}
    with joining_ranks(tmp_path / "run", (1, None)) as outcomes:
        helped = config.with_options(assign=f"{layer}:rank1")
        run_threads(lambda: train(helped, tmp_path / "run", propose=requests.get), 2)
    run_threads(lambda: train(config, tmp_path / "alone"), 1)
    assert isinstance(outcomes[0], list), outcomes
    assert [each["ranks"] for each in events(tmp_path / "run", "joined", "reshaped")] == [[2], [0, 1]]
    assert_same(tmp_path / "run", tmp_path / "alone")


def test_a_library_of_products_that_joining_ranks_lack_is_used_by_none(tmp_path, joins_after, monkeypatch):
    def load(name):
        library = SimpleNamespace(name=name, version="1", rounds=False, multiply=lambda a, b, out: False)
        return library if current_thread_communicator().size == 2 else None  # the job's ranks have it

    monkeypatch.setattr(product_choice, "load", load)
    joins_after(3)
    used = {}
    job = small_job(tmp_path, mesh={"data": 2}, steps=5, dtype="float32", products="onednn")
    with joining_ranks(tmp_path / "run", (1, None)) as outcomes:
        run_threads(lambda: train(job, tmp_path / "run", propose=lambda step: used.update({step: in_use()})), 2)
    assert isinstance(outcomes[0], list), outcomes
    assert (used[2]["float32"]["large"], used[4]["float32"]["large"]) == ("onednn", NUMPY)
    (joined,) = events(tmp_path / "run", "joined")
    assert len(joined["notices"]) == 1 and "--products onednn: it is not installed" in joined["notices"][0]


def test_ranks_that_join_scale_the_loss_as_the_others(tmp_path, joins_after, monkeypatch):
    monkeypatch.setattr(loss_scale, "GROW_AFTER", 2)
    joins_after(3)
    job = small_job(tmp_path, mesh={"data": 2}, steps=8, dtype="float16")
    with joining_ranks(tmp_path / "run", (1, ShapeRequest({"mesh": {"data": 3}}))) as outcomes:
        runs = run_threads(lambda: train(job, tmp_path / "run"), 2)
    (scale,) = {run.trainer.loss_scale.value for run in runs + outcomes[0]}
    assert scale != loss_scale.LossScale().value


# --- ranks that cannot join, and jobs that end meanwhile


def refusal(folder, job, wait=60.0, ranks=2):
    """Why two ranks cannot join this job, which trains meanwhile on two ranks; the job's events."""

    def attempt():
        begun(folder)
        with pytest.raises(UsageError) as error:
            run_threads(lambda: join(folder, wait=wait), ranks)
        why.append(str(error.value))
        done.set()

    def hold(step):
        """Go on after step 3 when there is a request, and after step 4, in which it is answered, when that is read."""
        until = time.monotonic() + 60
        while step in (3, 4) and not done.is_set() and time.monotonic() < until:
            if step == 3 and (folder / JoinRequest.FILE).exists():
                return
            time.sleep(0.01)

    why, done = [], threading.Event()
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    run_threads(lambda: train(job, folder, propose=hold), 2)
    thread.join(60)
    assert len(losses_in(folder)) == job.training.steps and not list(folder.glob("join*"))
    return why[0]


def test_other_data_are_refused_by_the_ranks_themselves(tmp_path):
    job, folder = small_job(tmp_path, mesh={"data": 2}), tmp_path / "run"
    checks = workload._check_corpus
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workload, "_check_corpus", lambda job, corpus: checks(job, replace(corpus, sha256="another")))
        assert "other files than the job was made for" in refusal(folder, job)


def test_another_version_is_refused_by_the_job(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_job, "facts_of", lambda config: {**facts_of(config), "spmd_engine": "0.1"})
        why = refusal(tmp_path / "run", small_job(tmp_path, mesh={"data": 2}, steps=8))
    assert 'refused: spmd_engine is "0.1", and "0.2.0" in the running job' in why


def test_a_page_of_strategies_takes_no_ranks(tmp_path):
    job = TrainConfig.of(strategy="data-parallel", model="mlp", data=small_job(tmp_path).data.path, steps=8, mesh=None)
    assert "data-parallel shards itself: no ranks can join it" in refusal(tmp_path / "run", job)


def test_a_folder_without_a_running_job_has_nothing_to_join(tmp_path):
    run_threads(lambda: train(small_job(tmp_path), tmp_path / "run"), 4)
    with pytest.raises(UsageError, match="has no running job to join; 'train --resume"):
        run_threads(lambda: join(tmp_path / "run"), 2)


def test_ranks_that_wait_when_the_run_ends_have_nothing_to_join(tmp_path, monkeypatch):
    monkeypatch.setattr(JoinRequests, "is_ready", lambda joining, world: False)  # as if the last step came first
    assert "the run has ended" in refusal(tmp_path / "run", small_job(tmp_path, mesh={"data": 2}, steps=2))


def test_a_job_that_does_not_answer_in_time_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(JoinRequests, "is_ready", lambda joining, world: False)
    assert "no answer in time" in refusal(tmp_path / "run", small_job(tmp_path, mesh={"data": 2}, steps=8), wait=0.1)


def test_a_folder_with_the_name_of_a_request_is_none(tmp_path):
    folder, job = tmp_path / "run", small_job(tmp_path, mesh={"data": 2}, steps=2)
    (folder / JoinRequest.FILE).mkdir(parents=True)
    run_threads(lambda: train(job, folder), 2)
    assert (folder / JoinRequest.FILE).is_dir()


ASKS = JoinRequest(2, {}, None, "0" * 16).as_json()
NO_REQUESTS = [
    *({**ASKS, "ranks": ranks} for ranks in (0, -1, 10**12, 10**300, True, "2", None)),
    *({**ASKS, "id": id} for id in ("../../etc/passwd", 7, None)),
    *({**ASKS, "shape": shape} for shape in (3, {"composition": 3}, {"composition": {}, "experts": {"a": 3}})),
    {**ASKS, "facts": 3}, None, [], 7, "x",
]  # fmt: skip


def test_what_is_no_request_to_join_is_a_warning_and_the_job_goes_on(tmp_path, caplog):
    for name, make in (("join-1.json", os.mkfifo), ("join-2.json", os.mkdir)):
        make(tmp_path / name)
    requests, path = JoinRequests(tmp_path, "", {}), tmp_path / JoinRequest.FILE
    for content in NO_REQUESTS:
        file = LockedFile.create(path, content)
        assert not requests.is_ready(solo()) and not path.exists(), content
        file.close()
    assert len(caplog.messages) == len(NO_REQUESTS) and all("\n" not in each for each in caplog.messages)
    for content in (b"[" * 100_000, b"", b"\xff", b"9" * 5000, b'{"a": "' + b"x" * (2 << 20)):
        path.write_bytes(content)  # of no process that still runs
        assert not requests.is_ready(solo()) and not path.exists()


def test_facts_that_are_nested_too_deep_are_no_request(tmp_path, caplog):
    file = LockedFile.create(
        tmp_path / JoinRequest.FILE, {**ASKS, "facts": json.loads('{"a":' * 900 + "1" + "}" * 900)}
    )
    assert not JoinRequests(tmp_path, "", {}).is_ready(solo()) and len(caplog.messages) == 1
    file.close()


@pytest.mark.parametrize("answer", [None, 3, [], {}, {"port": 3}])
def test_an_answer_that_cannot_be_read_is_one_line(tmp_path, answer):
    request = JoinRequest(1, {}, None, "0" * 16)
    LockedFile.create(tmp_path / f"join-{request.id}-answer.json", answer)
    with pytest.raises(UsageError, match="refused: the answer of the job cannot be read"), RunLock(tmp_path):
        list(Entrance(solo(), tmp_path, request, 60.0).enter())


def test_an_impossible_shape_leaves_the_ranks_that_joined_idle(tmp_path, joins_after):
    joins_after(2)
    folder, job = tmp_path / "run", small_job(tmp_path, mesh={"data": 2}, steps=5)
    with joining_ranks(folder, (2, ShapeRequest({"mesh": {"data": 9}}))) as outcomes:
        run_threads(lambda: train(job, folder, propose={4: ShapeRequest({"mesh": {"model": 4}})}.get), 2)
    assert isinstance(outcomes[0], list)
    (refused,) = events(folder, "not reshaped")
    assert "mesh data=9 needs 9 ranks; the job has 4" in refused["why"]
    assert [each["mesh"] for each in events(folder, "reshaped")] == ["model=4"]


def test_a_failure_of_a_rank_that_joined_is_one_of_all(tmp_path, joins_after, monkeypatch):
    """And so is one of the others."""
    joins_after(2)
    folder, job = tmp_path / "run", small_job(tmp_path, mesh={"data": 2}, steps=8)
    step = Trainer.step

    def failing(trainer):
        if trainer.engine.mesh.size == 3 and trainer.engine.mesh.rank == 2:
            raise ValueError("no more")
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", failing)
    group = 1, ShapeRequest({"mesh": {"data": 3}})
    with joining_ranks(folder, group) as outcomes, pytest.raises(ValueError, match="no more"):
        run_threads(lambda: train(job, folder), 2)
    assert isinstance(outcomes[0], ValueError)


def test_the_steps_before_a_join_do_not_wait(tmp_path):
    """A request that is never completed, as its writer is gone or no rank connects, stops no step."""
    folder, job = tmp_path / "run", small_job(tmp_path, mesh={"data": 2}, steps=6)
    folder.mkdir()
    config = facts_of(json.loads(json.dumps(job.as_json())))
    file = LockedFile.create(folder / JoinRequest.FILE, JoinRequest(2, config, None, "0" * 16).as_json())
    file.close()  # its lock is free
    (folder / JoinRequest.FILE).write_text("{}")
    run_threads(lambda: train(job, folder), 2)
    assert losses_in(folder).keys() == {1, 2, 3, 4, 5, 6} and not (folder / JoinRequest.FILE).exists()
