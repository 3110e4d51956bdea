"""Slot tables: one of each group, held by the first of its ranks on a node."""

from dataclasses import replace

import pytest

from spmd_engine.comm.shared_memory.slot_table import size_of_table
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models import GPT_SIZES, gpt
from spmd_engine.planning import analyze
from spmd_engine.planning.dry_run.rank_classes import slot_table_bytes
from spmd_engine.planning.machine.machine import read_machine
from spmd_engine.planning.simulator.step_evaluation import evaluate_step

MODEL = gpt(replace(GPT_SIZES["gpt-nano"], layers=2), "small")
AXES = {"data": 2, "model": 2}
FOUR, TWO = size_of_table(4), size_of_table(2)


@pytest.fixture(scope="module")
def analysis():
    return analyze(MODEL, AXES, ParallelConfig(mesh=AXES), batch_size=4)


def test_the_first_rank_of_a_group_holds_its_slot_table(analysis):
    assert list(analysis.tables) == [FOUR + 2 * TWO, TWO, TWO, 0]
    steps = [analysis.of_rank(rank).peak.bytes for rank in range(4)]
    assert analysis.peak_bytes_by_rank() == [step + table for step, table in zip(steps, analysis.tables, strict=True)]
    assert analysis.peak_bytes == analysis.peak_bytes_by_rank()[0]


def test_each_node_has_a_slot_table_of_its_own_ranks(analysis):
    alone = size_of_table(1)  # of a group that has one rank here, and another elsewhere
    assert slot_table_bytes(analysis, ["a", "a", "b", "b"]) == [2 * TWO + alone, alone, 2 * TWO + alone, alone]
    assert slot_table_bytes(analysis, ["a", "b", "c", "d"]) == [0, 0, 0, 0]


@pytest.mark.parametrize(("name", "are_there"), [("cpu", True), ("a100", False)])
def test_ranks_with_their_own_devices_hold_no_slot_tables(name, are_there):
    seen = evaluate_step(MODEL, read_machine(name).with_ranks(4), AXES, ParallelConfig(mesh=AXES), 4, 1)
    assert ("tables of groups" in seen.peak_bytes_by_kind) is are_there
    assert sum(seen.peak_bytes_by_kind.values()) == seen.analysis.peak_bytes
