"""``plan`` in whole: what it answers keeps the limits, as the analyzed step has it and not only an estimate."""

import pytest

from spmd_engine.models.names import build_model
from spmd_engine.planning.goals import Limits
from spmd_engine.planning.machine_file import read_machine
from spmd_engine.planning.planned import Request, plan


def asked(memory=None):
    return Request(build_model("gpt-nano"), read_machine("a100"), [2], [8], limits=Limits(memory=memory))


@pytest.fixture(scope="module")
def freely():
    return plan(asked())


@pytest.mark.parametrize("share", [0.93, 0.7])
def test_the_plan_s_own_peak_is_within_the_limit(freely, share):
    """A little less than what the quickest plan needs, so that its estimate may fit though its step does not."""
    limit = share * freely.foresight.analysis.peak_bytes
    answer = plan(asked(limit))
    assert answer.conflict is not None or answer.foresight.analysis.peak_bytes <= limit


def test_of_those_looked_at_it_is_the_quickest(freely):
    assert freely.foresight.seconds == min(each.seconds for each in freely.found.best)
