"""The dry run of a step is what the engine does; and how it is drawn."""

from collections import Counter

import pytest

import tiny
from spmd_engine import Mesh, run
from spmd_engine.cli import main
from spmd_engine.cli.show.communication import step_of
from spmd_engine.comm.mesh_position import all_positions
from spmd_engine.engine import schedules
from spmd_engine.engine.composition import Composition
from spmd_engine.engine.recompute import Recompute
from spmd_engine.models import GPTSize, gpt
from spmd_engine.models.names import build_model

OPTIONS = {
    "zero": None,
    "sequence_parallel": False,
    "schedule": None,
    "chunks": None,
    "stages": None,
    "recompute": "none",
    "compress": "none",
    "group_threshold": 1500,
    "group_cap": 1 << 20,
}
CASES = {
    "data=2": {},
    "data=2 zero 1": {"zero": 1},
    "data=3 zero 2": {"zero": 2},
    "data=2 zero 3": {"zero": 3},
    "data=2 zero 3 recompute": {"zero": 3, "recompute": "block"},
    "replicate=2,shard=2": {},
    "pipe=2,data=2": {},
    "pipe=2,data=2 zero-bubble": {"schedule": "zero-bubble", "zero": 1},
    "pipe=2,data=2 zero 3": {"zero": 3, "schedule": "zero-bubble"},
    "pipe=2 interleaved": {"schedule": "interleaved", "chunks": 2},
    "context=2,model=2 zero 3": {"zero": 3},
    "data=2 zero 1 bfloat16": {"zero": 1, "compress": "bfloat16"},
}


LABELS = ("parameters", "gradients", "input", "gradient")
MODEL = gpt(GPTSize(**{**tiny.SIZE.__dict__, "layers": 4}))


def axes_of(case):
    return {axis: int(size) for axis, size in (pair.split("=") for pair in case.split()[0].split(","))}


def dry_runs(case):
    """The steps of all ranks, of two micro-batches in float64."""
    return [step_of(MODEL, place, Composition(**OPTIONS | CASES[case]), 2, 8) for place in all_positions(axes_of(case))]


@pytest.mark.parametrize("case", CASES)
def test_a_step_sends_what_was_foretold(case):
    axes, options = axes_of(case), OPTIONS | CASES[case]
    foretold = dry_runs(case)

    def program():
        with Mesh(**axes) as mesh:
            name = options["schedule"] or ("1f1b" if "pipe" in axes else "sequential")
            engine = tiny.make_engine(
                mesh,
                layers=4,
                zero=options["zero"],
                compress=options["compress"],
                group_threshold=1500,
                schedule=schedules.named(name, options["chunks"]),
                recompute=Recompute(options["recompute"]),
            )
            mesh.ledger.clear()
            engine.step(tiny.batch(engine, 0, 2))
            engine.after_update()
            calls = Counter()
            for (operation, over, label), entry in mesh.ledger.entries.items():
                if label in LABELS:
                    calls[operation, over] += entry.calls
            return calls

    for step, calls in zip(foretold, run(program, len(foretold)), strict=True):
        assert Counter((each.operation, ",".join(each.over)) for each in step.communications) == calls


@pytest.mark.parametrize("case", CASES)
def test_transfers_lie_within_the_step(case):
    for step in dry_runs(case):
        for each in step.communications:
            assert 0 <= each.begins <= each.begins + each.priority <= len(step.computations), each


def test_gathers_are_a_group_ahead_and_reductions_hide_behind_the_backward():
    options = OPTIONS | {"zero": 3, "group_threshold": 1 << 20}
    step = step_of(build_model("gpt-nano"), all_positions({"data": 2})[0], Composition(**options), 1, 4)
    gathers = [each for each in step.communications if each.operation == "all_gather"]
    assert gathers[0].priority == 0 and all(each.priority > 0 for each in gathers[1:])
    reductions = [each for each in step.communications if each.operation == "reduce_scatter"]
    assert [each.priority > 0 for each in reductions] == [True] * (len(reductions) - 1) + [False]


def test_a_picture(capsys):
    main(["show", "communication", "--mesh", "data=4", "--zero", "3"])
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0] == "gpt-nano, mesh data=4: a step of rank 0"
    assert lines[4].split() == ["all_gather", "group1", "======"]
    table = next(i for i, line in enumerate(lines) if line.startswith("transfer"))
    row = "all_gather group1 data 1,155,072 0 embedding forward 6 block2/attention forward 6"
    assert lines[table + 2].split() == row.split()
    assert lines[-3].startswith("61 computations, 13 transfers of 12,262,656 bytes")


def test_what_cannot_be_drawn_is_refused(capsys):
    for arguments, message in [
        (["--mesh", "data=2", "--rank", "2"], "ranks are from 0 to 1"),
        (["--mesh", "data=2", "--compress", "top-k"], "only in a real step"),
        (["--mesh", "data=2", "--chunks", "2"], "Add --schedule interleaved"),
        (["--model", "deep-mlp", "--mesh", "data=2", "--group-threshold", "0"], "too many to draw"),
    ]:
        with pytest.raises(SystemExit) as caught:
            main(["show", "communication", *arguments])
        assert caught.value.code == 2 and message in capsys.readouterr().err
