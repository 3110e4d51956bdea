"""The states of a change of shape: which step follows which, and what is reported; without ranks, files and arrays."""

from dataclasses import replace

import pytest

from spmd_engine.adaptive.change_of_shape import (
    AdvanceLive,
    BeginLive,
    ChangeOfShape,
    CheckShape,
    EstimateChange,
    MoveTo,
    Notify,
    ReadRequest,
)
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.reshape import Shape, ShapeRequest

NEW, NEARER = (Shape(ParallelConfig(stages=stages), (0, 1)) for stages in ("0,3", "0,2"))
LIVE = ShapeRequest({}, id="mine", protocol="live", within=5.0)
STOP = ShapeRequest({}, id="mine")
FACTS, COPIED = {"after": "new"}, {"steps": 2}
REFUSED = [Notify("not_reshaped", {"why": "no", "request": "mine"})]


def reshaped(notices=(), **more):
    return Notify("reshaped", {"after": "new", "notices": list(notices), **more, "request": "mine"})


def checked(request, at_once=NEW):
    """A change that all ranks can make, and what follows."""
    change = ChangeOfShape()
    assert change.due() == [ReadRequest()] and change.read(request) == [CheckShape(request)]
    following = change.checked(NEW, ["a note"], at_once)
    assert change.state == "planned"
    return change, following


@pytest.mark.parametrize("protocol", ["stop-and-copy", "checkpoint-based"])
def test_a_change_between_two_steps_moves_once_and_is_reported(protocol):
    change, following = checked(ShapeRequest({}, id="mine", protocol=protocol))
    assert following == [MoveTo(NEW, protocol)]
    assert change.moved(NEW, FACTS, {}) == [reshaped(["a note"])]
    assert change.state == "committed" and change.due() == [ReadRequest()]


def test_a_dry_run_is_estimated_and_moves_nothing():
    change, following = checked(replace(LIVE, dry_run=True), at_once=NEARER)
    assert following == [EstimateChange(NEW)]
    facts = {"protocols": {}, "notices": ["a note"], "request": "mine"}
    assert change.estimated({"protocols": {}}) == [Notify("estimated", facts)]
    assert change.state == "estimated" and change.due() == [ReadRequest()]


def test_a_live_migration_advances_after_each_step_until_all_is_copied():
    change, following = checked(LIVE)
    assert following == [BeginLive(NEW, 5.0)]
    assert change.copying({"bytes": 3}) == [Notify("migrating", {"request": "mine", "bytes": 3})]
    assert change.state == "moving"
    assert change.stepped("") == [AdvanceLive("")] and change.advanced(False) == []
    assert change.stepped("") == [AdvanceLive("")] and change.advanced(True) == [MoveTo(NEW, "live")]
    assert change.moved(NEW, FACTS, COPIED) == [reshaped(["a note"], steps=2)]


def test_a_live_migration_is_given_up_when_the_run_ends():
    change, _ = checked(LIVE)
    change.copying({})
    assert change.stepped("the run ends") == [AdvanceLive("the run ends")]
    assert change.failed("no") == REFUSED and change.state == "refused"


def test_a_boundary_moves_within_the_overlap_first_and_the_overlap_follows():
    change, following = checked(STOP, at_once=NEARER)
    assert following == [MoveTo(NEARER, "stop-and-copy")]
    assert change.moved(NEARER, FACTS, {}) == [reshaped(["a note"]), BeginLive(NEW, None)]
    change.copying({})
    change.stepped("")
    assert change.advanced(True) == [MoveTo(NEW, "live")]
    assert change.moved(NEW, FACTS, COPIED) == [reshaped(steps=2)]


def test_an_overlap_that_cannot_follow_stays_without_a_second_answer():
    change, _ = checked(STOP, at_once=NEARER)
    change.moved(NEARER, FACTS, {})
    assert change.failed("no") == [] and change.state == "committed"


@pytest.mark.parametrize("stage", ["due", "read", "checked", "copying"])
def test_a_refusal_at_any_point_is_one_answer_and_another_request_can_follow(stage):
    change = ChangeOfShape()
    events = {
        "due": lambda: change.due("mine"),
        "read": lambda: change.read(LIVE),
        "checked": lambda: change.checked(NEW, [], NEW),
        "copying": lambda: change.copying({}),
    }
    for name, event in events.items():
        event()
        if name == stage:
            break
    assert change.failed("no") == REFUSED and change.state == "refused"
    assert change.due() == [ReadRequest()] and change.state == "requested"


def test_ranks_that_join_are_reported_before_the_shape_is_checked():
    change, joined = ChangeOfShape(), {"ranks": [2]}
    change.due()
    assert change.read(STOP, joined) == [Notify("joined", joined), CheckShape(STOP)]


@pytest.mark.parametrize("joined, reports", [({"ranks": [2]}, 1), (None, 0)])
def test_without_a_request_nothing_follows(joined, reports):
    change = ChangeOfShape()
    change.due()
    assert len(change.read(None, joined)) == reports and change.state == "committed"


def test_an_event_out_of_turn_is_an_error():
    change = ChangeOfShape()
    for event in (lambda: change.read(STOP), lambda: change.stepped(""), lambda: change.failed("no")):
        with pytest.raises(AssertionError, match="committed"):
            event()
    change.due()
    with pytest.raises(AssertionError, match="requested"):
        change.due()
