"""Numbers of all ranks in a line of metrics.jsonl: of many ranks, what readers need of them."""

import json

import pytest

from spmd_engine.training.numbers_by_rank import LISTED, expanded
from spmd_engine.training.trainer import StepReport


@pytest.mark.parametrize("ranks", [3, LISTED, LISTED + 1, 4096])
def test_a_line_lists_few_ranks_and_of_many_those_that_stand_out(ranks):
    shares = [[0.9, 0.1, 0.0]] * ranks
    shares[2] = [1.0, 0.0, 0.0]
    report = StepReport(1, 2.0, 1.0, 0.1, 8, 1.0, 8.0, shares=shares, private_bytes=[1 << 20] * ranks)
    line = json.loads(json.dumps(report.as_line()))
    assert len(json.dumps(line)) < (100 * ranks if ranks <= LISTED else 1500)
    assert (line == report.as_dict()) == (ranks <= LISTED)
    assert StepReport.from_dict(line) == report
    if ranks > LISTED:
        assert line["shares"]["median"] == [0.9, 0.1, 0.0] and line["shares"]["maximum"] == [1.0, 0.1, 0.0]


DAMAGED = [{}, {"ranks": 1 << 40, "median": 1, "of": {}}, {"ranks": 2, "median": 1, "of": {"2": 1}}]


@pytest.mark.parametrize("damaged", DAMAGED, ids=str)
def test_numbers_by_rank_that_are_damaged_are_an_error(damaged):
    with pytest.raises(ValueError, match="numbers"):
        expanded(damaged)
