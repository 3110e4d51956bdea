"""Live migration: the steps go on during the copy, no bit of a result changes, and a failure leaves the old shape."""

import json
import os
import signal
import tempfile
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_shape_changes import CHANGES, assert_same, drawn_requests, events, job_of, trained

from spmd_engine import Mesh, TrainConfig, run_threads, train
from spmd_engine.adaptive import LiveMigration, ShapeRequest, migration
from spmd_engine.checkpoints import Save
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.comm.communicators.threads import current_thread_communicator
from spmd_engine.engine import layered
from spmd_engine.engine.state.engine_state import StateReshard
from spmd_engine.errors import CheckpointError, CommunicationTimeout, UsageError
from spmd_engine.observability.run_record import RunRecord
from support import saved
from support.on_ranks import numbers_of_ranks, on_ranks
from support.random_jobs import RandomJob, losses_in

TEXT_MODEL, EXPERTS, IMAGES, ADAPTERS, MLP = 3, 8, 1, 2, 5  #: seeds that draw jobs of these kinds
PORTIONS = 4  #: in which the tests copy, one after each step
LEARN_SPEED = LiveMigration._learn_speed


@pytest.fixture(autouse=True)
def in_portions(monkeypatch):
    """All that moves, however small, is copied in some portions, one after each step."""
    monkeypatch.setattr(migration, "LEAST", 1)
    monkeypatch.setattr(migration, "MOST_STEPS", PORTIONS)
    monkeypatch.setattr(migration, "BYTES_PER_SECOND", 1.0)
    monkeypatch.setattr(LiveMigration, "_learn_speed", lambda self, ranks: None)


def config(seed, folder, **options):
    what = {"steps": 8, "batch_size": 12, "micro_batches": 2, "eval_every": 5, "save_every": 0, "timeout": 60.0}
    return TrainConfig.of(**RandomJob(seed, folder).what | what | options)


def ended(folder):
    return events(folder, "reshaped", "not reshaped")[-1]


def bytes_sent(ledger, label):
    return sum(entry.sent for (_, _, name), entry in ledger.entries.items() if name == label)


# --- the same bits as a change between two steps


@dataclass(frozen=True)
class Case:
    seed: int
    ranks: int
    begins: dict  #: composition
    request: dict  #: arguments of ShapeRequest
    first: dict | None = None  #: a request after the first step
    moves: tuple = ()  #: some of what moves
    nodes: str = "aaaa"


CASES = {
    "a pipeline boundary": Case(
        TEXT_MODEL, 2, {"mesh": {"pipe": 2}, "stages": "0,2"}, {"composition": {"stages": "0,3"}},
        moves=("block0/attention",),
    ),
    "a boundary of stages of replicas, ZeRO-1": Case(
        TEXT_MODEL, 4, {"mesh": {"pipe": 2, "data": 2}, "stages": "0,2", "zero": 1}, {"composition": {"stages": "0,3"}},
        moves=("block0/attention",),
    ),
    "a stage to an idle rank": Case(
        MLP, 3, {"mesh": {"data": 3}}, {"composition": {}, "ranks": [0, 2]},
        first={"composition": {"mesh": {"pipe": 2}}, "ranks": [0, 1]},
    ),
    "experts": Case(
        EXPERTS, 2, {"mesh": {"expert": 2}}, {"composition": {}, "experts": {"block0/moe": [1, 0, 1, 0, 0]}},
        moves=("block0/moe/expert0", "block0/moe/expert3"),
    ),
    "layers with running statistics": Case(
        IMAGES, 2, {"mesh": {"pipe": 2}}, {"composition": {"stages": "0,1"}}, moves=("block1/norm",)
    ),
    "frozen weights under adapters": Case(
        ADAPTERS, 2, {"mesh": {"pipe": 2}}, {"composition": {"stages": "0,1"}}, moves=("block0/mlp",)
    ),
    "all to other axes, ZeRO-3 to 2": Case(
        MLP, 4, {"mesh": {"data": 4}, "zero": 3}, {"composition": {"mesh": {"model": 2, "data": 2}, "zero": 2}},
        nodes="abab",
    ),
    "to uneven stages": Case(
        TEXT_MODEL, 3, {"mesh": {"data": 3}, "zero": 1},
        {"composition": {"mesh": {"pipe": 2, "model": [1, 2]}, "zero": None}},
    ),
    "a rank leaves": Case(MLP, 3, {"mesh": {"data": 3}, "zero": 1}, {"composition": {"mesh": {"data": 2}}}),
}  # fmt: skip
#: A boundary moves within an overlap of one layer on each side, and this is then around the new boundary.
OVERLAPS = {
    "text": (TEXT_MODEL, 2, {"mesh": {"pipe": 2}, "stages": "0,2"}, "0,3", "1:3"),
    "running statistics": (IMAGES, 2, {"mesh": {"pipe": 2}, "stages": "0,2"}, "0,1", "1:3"),
    "experts, ZeRO-1": (EXPERTS, 4, {"mesh": {"pipe": 2, "expert": 2}, "stages": "0,2", "zero": 1}, "0,1", "1:3"),
    "frozen weights, ZeRO-3": (ADAPTERS, 4, {"mesh": {"pipe": 2, "data": 2}, "stages": "0,2", "zero": 3}, "0,1", "1:3"),
}
LONG = (
    "a pipeline boundary",  # moves on MPI ranks
    "a boundary of stages of replicas, ZeRO-1", "a stage to an idle rank", "frozen weights under adapters",
    "a rank leaves", "to uneven stages", "text", "experts, ZeRO-1", "frozen weights, ZeRO-3",
)  # fmt: skip


def in_time(names):
    """The names, of which those in ``LONG`` are in soak."""
    return [pytest.param(name, marks=[pytest.mark.soak] * (name in LONG)) for name in names]


def migrated(case, job, run, at, protocol):
    """Train with the change of a case after step ``at``; returns this rank's ledger."""
    requests = {at: ShapeRequest(**case.request, protocol=protocol)}
    if case.first:
        requests[1] = ShapeRequest(**case.first)
    return train(job, run, propose=requests.get).engine.mesh.ledger


def jobs_of(name, files):
    """The job of a case with an overlap, and without."""
    seed, _, begins, *_ = OVERLAPS[name]
    return config(seed, files, overlap_layers="1", **begins), config(seed, files, **begins)


def moves_within_overlap(name, jobs, folder):
    """Train with a move of a boundary within the overlap after step 3, and without overlap and move; returns the bytes
    of this rank's copies."""
    *_, stages, held = OVERLAPS[name]
    requests = {3: ShapeRequest({"stages": stages})}
    ledger = train(jobs[0], folder / "moved", propose=requests.get).engine.mesh.ledger
    train(jobs[1], folder / "plain")
    (begun,), (moved, refilled) = (events(folder / "moved", kind) for kind in ("migrating", "reshaped"))
    assert moved["step"] == 3 and moved["after"].endswith(f"overlap_layers {held}")
    assert refilled["after"].endswith("overlap_layers 1") and refilled["bytes"] == begun["bytes"] > 0
    assert bytes_sent(ledger, "reshard") == 0
    return bytes_sent(ledger, migration.LABELS[0])


@pytest.mark.parametrize("name", in_time(OVERLAPS))
def test_a_boundary_moves_within_the_overlap_at_once_and_refills_it_while_steps_go_on(tmp_path, name):
    jobs = jobs_of(name, tmp_path)
    copied = run_threads(lambda: moves_within_overlap(name, jobs, tmp_path), OVERLAPS[name][1])
    (begun,) = events(tmp_path / "moved", "migrating")
    assert sum(copied) == begun["bytes"]
    assert_same(tmp_path / "moved", tmp_path / "plain")


def test_an_overlap_ends_at_once(tmp_path):
    job, requests = jobs_of("text", tmp_path)[0], {3: ShapeRequest({"overlap_layers": "0"})}
    run_threads(lambda: train(job, tmp_path / "run", propose=requests.get), 2)
    (change,) = events(tmp_path / "run", "reshaped")
    assert change["after"].endswith("overlap_layers 0") and not events(tmp_path / "run", "migrating")


@pytest.mark.parametrize(
    "before, after",
    [
        pytest.param("1", None, id="with overlap"),
        pytest.param(None, "2", id="without", marks=pytest.mark.soak),
    ],
)
def test_a_run_resumes_with_another_overlap(tmp_path, before, after):
    mesh = {"mesh": {"pipe": 2}, "stages": "0,2"}

    def die(step):
        if step == 6:
            raise KeyboardInterrupt

    def run_with(folder, overlap, **options):
        job = config(IMAGES, tmp_path, save_every=4, **mesh, overlap_layers=overlap)
        run_threads(lambda: train(job, tmp_path / folder, **options), 2)

    with pytest.raises(KeyboardInterrupt):
        run_with("run", before, propose=die)
    run_with("run", after, resume=True)
    run_with("alone", None)
    assert_same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.soak
@pytest.mark.mpi(ranks=2)
def test_a_boundary_moves_within_the_overlap_on_mpi_ranks():
    with Mesh() as mesh, tempfile.TemporaryDirectory() as mine:
        folder = Path(text_from_rank_zero(mesh.group(), lambda: mine))
        moves_within_overlap("text", jobs_of("text", mine), folder)
        if mesh.rank == 0:
            assert_same(folder / "moved", folder / "plain")
        mesh.barrier()


@pytest.mark.parametrize("name", in_time(CASES))
def test_no_bit_changes_and_steps_go_on(tmp_path, name):
    case = CASES[name]
    job = config(case.seed, tmp_path, **case.begins)
    nodes = list(case.nodes[: case.ranks])
    ledgers = run_threads(lambda: migrated(case, job, tmp_path / "live", 3, "live"), case.ranks, nodes=nodes)
    (plan,), change = events(tmp_path / "live", "migrating"), ended(tmp_path / "live")
    assert change["event"] == "reshaped", change
    # One portion after each step: the steps between the plan and the change were made during the copy.
    assert (plan["step"], change["step"], change["steps"]) == (3, 3 + PORTIONS, PORTIONS)
    assert losses_in(tmp_path / "live").keys() == set(range(1, 9))
    placed = {layer: tuple(parts) for layer, parts in case.request.get("experts", {}).items()}
    assert RunRecord.read(tmp_path / "live").experts == placed
    assert set(case.moves) <= set(plan["what"]), plan["what"]
    # Each element is copied once; of the portions copied before, 0 to all but one, gradients follow; then nothing.
    assert sum(bytes_sent(ledger, "migration: copy") for ledger in ledgers) == plan["bytes"] > 0
    assert sum(plan["moves"].values()) == plan["bytes"] == change["bytes"]
    gradients = sum(bytes_sent(ledger, "migration: gradients") for ledger in ledgers)
    whole = plan["bytes_of_gradients"] * sum(range(PORTIONS)) / PORTIONS
    assert abs(gradients - whole) < 8 * 2 * PORTIONS**2 * case.ranks  # of float64, as portions are rounded
    assert case.first or sum(bytes_sent(ledger, "reshard") for ledger in ledgers) == 0
    stopped = lambda: migrated(case, job, tmp_path / "stopped", 3 + PORTIONS, "stop-and-copy")
    run_threads(stopped, case.ranks, nodes=nodes)
    assert losses_in(tmp_path / "live") == losses_in(tmp_path / "stopped")
    assert saved.everything(tmp_path / "live") == saved.everything(tmp_path / "stopped")


@pytest.mark.parametrize("ranks", numbers_of_ranks(mpi=(2,)))
def test_on_mpi_ranks(ranks):
    def program():
        with Mesh() as mesh, tempfile.TemporaryDirectory() as mine:
            folder = Path(text_from_rank_zero(mesh.group(), lambda: mine))
            case = CASES["a pipeline boundary" if mesh.size == 2 else "a stage to an idle rank"]
            job = config(case.seed, mine, **case.begins | ({} if mesh.size == 2 else {"mesh": {"data": mesh.size}}))
            for run, at, protocol in (("live", 3, "live"), ("stopped", 3 + PORTIONS, "stop-and-copy")):
                migrated(case, job, folder / run, at, protocol)
            if mesh.rank == 0:
                assert ended(folder / "live")["steps"] == PORTIONS
                assert saved.everything(folder / "live") == saved.everything(folder / "stopped")
            mesh.barrier()

    on_ranks(program, ranks)


def test_by_a_checkpoint(tmp_path):
    case = CASES["a stage to an idle rank"]
    job = config(case.seed, tmp_path, **case.begins)
    for protocol in "checkpoint-based", "stop-and-copy":
        run_threads(lambda to=protocol: migrated(case, job, tmp_path / to, 3, to), case.ranks)
    assert [each["step"] for each in events(tmp_path / "checkpoint-based", "saved")] == [3, 8]
    assert ended(tmp_path / "checkpoint-based")["event"] == "reshaped"
    assert saved.everything(tmp_path / "checkpoint-based") == saved.everything(tmp_path / "stop-and-copy")


# --- what is announced


def test_the_announced_seconds_follow_from_the_measured_speed(tmp_path, monkeypatch):
    """At this speed one portion after each step fits into its share: as many steps as portions, and their copy."""
    case, speed = CASES["a stage to an idle rank"], 1e9

    def learn(live, ranks):
        live.rate = speed

    monkeypatch.setattr(LiveMigration, "_learn_speed", learn)
    monkeypatch.setattr(migration, "SHARE", 0.0)
    job = config(case.seed, tmp_path, **case.begins)
    run_threads(lambda: migrated(case, job, tmp_path / "run", 3, "live"), case.ranks)
    (plan,) = events(tmp_path / "run", "migrating")
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (step,) = (line["seconds"] for line in lines if line["step"] == 3)
    assert plan["seconds"] == pytest.approx(PORTIONS * step, abs=1e-3)


@pytest.mark.parametrize("live", [False, True])
def test_a_change_in_which_nothing_moves_is_told_and_made(tmp_path, monkeypatch, live):
    monkeypatch.setattr(LiveMigration, "_learn_speed", LEARN_SPEED)
    change = ShapeRequest({"mesh": {"model": 2}}, protocol="live")
    job = config(MLP, tmp_path, mesh={"data": 2}, steps=8)
    requests = {1: change if live else replace(change, dry_run=True)}
    run_threads(lambda: train(job, tmp_path / "run", propose=requests.get), 2)
    if live:
        assert ended(tmp_path / "run")["event"] == "reshaped"
    else:
        (told,) = events(tmp_path / "run", "estimated")
        assert [each["bytes"] for each in told["protocols"].values()] == [0, 0, 0]


@pytest.mark.parametrize(
    "protocol, label", [pytest.param("stop-and-copy", "reshard", marks=pytest.mark.soak), ("live", "migration: copy")]
)
def test_a_dry_run_moves_nothing_and_tells_what_a_protocol_will_move(tmp_path, protocol, label):
    case = CASES["all to other axes, ZeRO-3 to 2"]
    change = ShapeRequest(**case.request, protocol=protocol)
    requests = {1: replace(change, dry_run=True, id="mine"), 2: change}
    job = config(case.seed, tmp_path, **case.begins)
    runs = run_threads(lambda: train(job, tmp_path / "run", propose=requests.get), 4, nodes=list(case.nodes))
    (told,), (done,) = events(tmp_path / "run", "estimated"), events(tmp_path / "run", "reshaped")
    assert (told["step"], told["request"], told["from"], told["to"]) == (1, "mine", done["before"], done["after"])
    sent = sum(bytes_sent(run.engine.mesh.ledger, label) for run in runs)
    assert sent == told["protocols"][protocol]["bytes"] == sum(told["protocols"][protocol]["moves"].values()) > 0
    assert 0 < told["protocols"]["checkpoint-based"]["saved"] <= told["protocols"]["checkpoint-based"]["loaded"]
    assert all(0 < each["stops"] <= each["seconds"] for each in told["protocols"].values())
    assert done["step"] == (2 + PORTIONS if protocol == "live" else 2)


@pytest.mark.soak
@pytest.mark.parametrize("seed, nodes", [(3, "abab"), (8, "abab"), (1, "aabb"), (2, "aaaa"), (0, "abab"), (7, "abab")])
def test_ten_live_changes_change_no_result(tmp_path, monkeypatch, seed, nodes):
    monkeypatch.setattr(migration, "MOST_STEPS", 3)
    job = job_of(seed, tmp_path, save_every=4, check_replicas_every=1, save_in_background=True)
    requests = iter([replace(each, protocol="live") for each in drawn_requests(job, 4).values()])
    job.steps = job.what["steps"] = 5 * CHANGES
    trained(job, tmp_path / "run", 4, SimpleNamespace(get=lambda step: next(requests, None)), list(nodes))
    trained(job, tmp_path / "alone", 1, {})
    assert len(events(tmp_path / "run", "reshaped")) >= 5, events(tmp_path / "run", "not reshaped")
    assert_same(tmp_path / "run", tmp_path / "alone")


# --- failures

MANY = 12  #: portions
PLANNING, SWITCH = ("describing the new shape", "planning", "counting", "allocating"), ("placing", "filling")
#: Where a rank fails: while the plan is made, at each packing of a portion and each update, and in the new shape, which
#: has been placed once before, without memory, to describe it.
EXCHANGES = MANY + migration.TRIALS
POINTS = [*((stage, 1) for stage in PLANNING), *product(("packing", "updating"), range(1, EXCHANGES + 1))]
POINTS += [("placing", 2), ("filling", 1)]
KINDS = (RuntimeError, "broken"), (UsageError, "refused"), (CommunicationTimeout, "too late"), (MemoryError, "full")
FAULTS = [(*point, rank, KINDS[(number + rank) % 4]) for number, point in enumerate(POINTS) for rank in range(3)]


class Faults:
    """Lets a rank fail in each of several live migrations, one after the other, and in none at last."""

    def __init__(self, monkeypatch, faults):
        self.faults, self.fault, self.counts = [*faults, None], None, {}
        attempt, place, fill = LiveMigration._attempt, layered.EngineState, StateReshard._fill

        def attempted(live, stage, do):
            return attempt(live, stage, lambda: self.at(stage) or do())

        monkeypatch.setattr(LiveMigration, "_attempt", attempted)
        monkeypatch.setattr(layered, "EngineState", lambda *a, **options: self.at("placing") or place(*a, **options))
        monkeypatch.setattr(StateReshard, "_fill", lambda *a: self.at("filling") or fill(*a))

    def propose(self, step):
        """The next request, on rank 0; it is asked for while no migration goes on."""
        if step == 1:
            return ShapeRequest({"mesh": {"pipe": 2}}, ranks=[0, 1])
        self.counts.clear()
        if not self.faults:
            return None
        self.fault = self.faults.pop(0)
        return ShapeRequest({"mesh": {"pipe": 3}}, protocol="live")

    def at(self, stage):
        """Fail, if the turn is at this rank at this stage."""
        rank = current_thread_communicator().rank
        self.counts[stage, rank] = count = self.counts.get((stage, rank), 0) + 1
        if self.fault and self.fault[:3] == (stage, count, rank):
            kind, text = self.fault[3]
            raise kind(text)


def run_with(faults, monkeypatch, folder, steps):
    monkeypatch.setattr(migration, "MOST_STEPS", MANY)
    monkeypatch.setattr(migration, "LEAST", 1)
    job = config(MLP, folder, mesh={"data": 3}, steps=steps, eval_every=0)
    run_threads(lambda: train(job, folder / "run", propose=Faults(monkeypatch, faults).propose), 3)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(FAULTS[::37], id="3 points, on one rank each"),
        pytest.param(FAULTS, id="36 points, on each rank", marks=pytest.mark.soak),
    ],
)
def test_a_failure_anywhere_leaves_the_old_shape_and_the_job_goes_on(tmp_path, monkeypatch, faults):
    """Two stages, and the idle rank that takes a third, fail at points of a migration."""
    assert len(POINTS) == 36
    taken = {**dict.fromkeys(PLANNING, 0), **dict.fromkeys(SWITCH, MANY)}
    steps = sum(2 + taken.get(stage, count) for stage, count, *_ in faults) + 2 * MANY
    run_with(faults, monkeypatch, tmp_path, steps)
    answers = events(tmp_path / "run", "reshaped", "not reshaped")[1:]
    assert len(answers) == len(faults) + 1, answers[-1]
    for (stage, _, rank, (kind, text)), answer in zip(faults, answers[:-1], strict=True):
        assert answer["event"] == "not reshaped" and f"rank {rank} of 3: " in answer["why"], (stage, answer)
        assert answer["why"].endswith(text if kind is UsageError else f"{kind.__name__}: {text}"), (stage, answer)
    assert answers[-1]["event"] == "reshaped" and answers[-1]["ranks"] == [0, 1, 2]
    # The same bits as without all that.
    alone = {
        1: ShapeRequest({"mesh": {"pipe": 2}}, ranks=[0, 1]),
        answers[-1]["step"]: ShapeRequest({"mesh": {"pipe": 3}}),
    }
    job = config(MLP, tmp_path, mesh={"data": 3}, steps=steps, eval_every=0)
    run_threads(lambda: train(job, tmp_path / "alone", propose=alone.get), 3)
    assert losses_in(tmp_path / "run") == losses_in(tmp_path / "alone")
    assert saved.everything(tmp_path / "run") == saved.everything(tmp_path / "alone")


def test_it_is_given_up_after_its_time_or_with_the_run(tmp_path, monkeypatch):
    times = iter(range(10_000))
    monkeypatch.setattr(migration, "MOST_STEPS", MANY)
    monkeypatch.setattr(migration, "monotonic", lambda: next(times))  # another second at each look, of one of two ranks
    limited = ShapeRequest({"stages": "0,1"}, protocol="live", within=5)
    late = {1: limited, 12: ShapeRequest({"stages": "0,1"}, protocol="live")}
    job = config(MLP, tmp_path, mesh={"pipe": 2}, steps=14)
    run_threads(lambda: train(job, tmp_path / "run", propose=late.get), 2)
    first, last = (each["why"] for each in events(tmp_path / "run", "not reshaped"))
    assert first == "the live migration is given up: it is not complete after 5 s"
    assert last == "the live migration is given up: the run ends"


def test_a_failed_save_ends_the_run_and_is_no_refusal(tmp_path, monkeypatch):
    """A save in the background ends before the shape changes: if it fails, idle ranks end as the others do."""

    def failing(save):
        if save.step == 2 + PORTIONS:
            raise CheckpointError("the disk is full")
        return finish(save)

    def program():
        with pytest.raises(UsageError, match="the disk is full"):
            migrated(case, job, tmp_path / "run", 3, "live")

    finish, case = Save.finish, CASES["a stage to an idle rank"]
    monkeypatch.setattr(Save, "finish", failing)
    job = config(case.seed, tmp_path, **case.begins, save_every=2 + PORTIONS, save_in_background=True, eval_every=0)
    run_threads(program, case.ranks)
    assert not events(tmp_path / "run", "not reshaped") and len(events(tmp_path / "run", "migrating")) == 1


def test_copies_without_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(migration, "memory_here", lambda: 1000)
    request = ShapeRequest({"stages": "0,1"}, protocol="live")
    job = config(MLP, tmp_path, mesh={"pipe": 2})
    run_threads(lambda: train(job, tmp_path / "run", propose={1: request}.get), 2)
    assert "the copies on node" in ended(tmp_path / "run")["why"]


IN_COPY = ("packing", 3 + migration.TRIALS, 0), ("updating", 2 + migration.TRIALS, 2)


@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(fault, marks=pytest.mark.soak) for fault in IN_COPY),
        ("filling", 1, 1),
    ],
    ids=lambda fault: fault[0],
)
def test_a_killed_run_continues_exactly(tmp_path, monkeypatch, fault):
    """SIGKILL during the copy, or while the shape changes, as if a rank had been killed: all end."""
    faults = Faults(monkeypatch, [(*fault, (Killed, ""))])
    job = config(MLP, tmp_path, mesh={"data": 3}, steps=14, save_every=2)
    child = os.fork()
    if not child:
        run_threads(lambda: train(job, tmp_path / "run", propose=faults.propose), 3)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL and len(events(tmp_path / "run", "migrating")) == 1
    assert not events(tmp_path / "run", "reshaped")[1:]
    resumed = config(MLP, tmp_path, mesh={"pipe": 2}, steps=14)
    run_threads(lambda: train(resumed, tmp_path / "run", resume=True), 2)
    alone = {1: ShapeRequest({"mesh": {"pipe": 2}}, ranks=[0, 1])}
    run_threads(lambda: train(job, tmp_path / "alone", propose=alone.get), 3)
    assert losses_in(tmp_path / "run") == losses_in(tmp_path / "alone")
    assert saved.everything(tmp_path / "run") == saved.everything(tmp_path / "alone")


class Killed(Exception):
    def __init__(self, text):
        os.kill(os.getpid(), signal.SIGKILL)
