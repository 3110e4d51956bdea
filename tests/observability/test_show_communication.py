"""`show communication`: a rank's step as the analysis predicts it, which tests/planning hold to what ranks do."""

import pytest

from spmd_engine.cli import main
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models.names import build_model
from spmd_engine.planning import analyze


def test_gathers_are_a_group_ahead_and_reductions_hide_behind_the_backward():
    analysis = analyze(build_model("gpt-nano"), {"data": 2}, ParallelConfig(zero=3), batch_size=2)
    communications = analysis.classes[0].step.communications
    gathers = [each for each in communications if each.operation == "all_gather"]
    assert gathers[0].priority == 0 and all(each.priority > 0 for each in gathers[1:])
    reductions = [each for each in communications if each.operation == "reduce_scatter"]
    assert reductions and all(each.priority > 0 for each in reductions)


def test_a_picture(capsys):
    main(["show", "communication", "--mesh", "data=4", "--zero", "3", "--batch-size", "4"])
    lines = capsys.readouterr().out.strip().splitlines()
    drawn = lines.index("gpt-nano, mesh data=4: a step of rank 0")
    sums = [line.split() for line in lines[:drawn] if line]
    assert sums[0][0] == "transfers" and sum(int(line[-3]) for line in sums[1:]) == 15  # a summary first
    assert sum(int(line[-2].replace(",", "")) for line in sums[1:]) == 9_197_016
    lines = lines[drawn:]
    assert lines[0] == "gpt-nano, mesh data=4: a step of rank 0"
    assert lines[4].split() == ["all_gather", "parameters", "======"]
    table = next(i for i, line in enumerate(lines) if line.startswith("transfer"))
    # A quarter of 1,155,072 bytes, to three others.
    row = "all_gather parameters data 1,2,3 866,304 0 embedding forward 6 block2/attention forward 6"
    assert lines[table + 2].split() == row.split()
    assert lines[-2].startswith("65 computations; 15 collectives and messages send 9,197,016 bytes")


def test_what_layers_and_compressed_gradients_send_is_drawn_too(capsys):
    main(["show", "communication", "--mesh", "data=2,model=2", "--compress", "top-k:0.1"])
    text = capsys.readouterr().out
    assert "all_reduce block0/mlp" in text and "all_gather gradients" in text
    assert "only the number of the largest entries matters" in text  # what values would decide, and what was assumed


def test_what_cannot_be_drawn_is_refused(capsys):
    for arguments, message in [
        (["--mesh", "data=2", "--rank", "2"], "ranks are from 0 to 1"),
        (["--mesh", "data=2", "--chunks", "2"], "Add --schedule interleaved"),
        (["--mesh", "data=2", "--group-threshold", "0", "--micro-batches", "2", "--zero", "3"], "too many to draw"),
    ]:
        with pytest.raises(SystemExit) as caught:
            main(["show", "communication", *arguments])
        assert caught.value.code == 2 and message in capsys.readouterr().err
