"""Models with experts on the command line: trained, warned about, shown."""

import json

import numpy as np
import pytest

from spmd_engine.training import TrainConfig
from support.command_line import QUIET, TEXT

SMALL = ["--model", "gpt-moe-nano", "--experts", "3", "--batch-size", "2", *QUIET, *TEXT]


def test_a_run_tells_of_its_experts_and_is_shown(here, tmp_path):
    code, _, errors = here("train", *SMALL, "--steps", "1", "--capacity-factor", "0.2", "--run", "few")
    assert code == 0
    assert "of 4,096 choices of experts were dropped, more than half; raise --capacity-factor" in errors
    assert "experts: the busiest, block" in errors
    (line,) = (tmp_path / "runs" / "few" / "metrics.jsonl").read_text().splitlines()
    told = json.loads(line)["side_outputs"]
    assert sum(told["block3/moe/load"]) == 2 * 2 * 128 and len(told["block3/moe/load"]) == 3
    assert told["block3/moe/balance"] > 0 and told["block3/moe/z"] > 0 and told["block3/moe/dropped"] > 256
    code, output, _ = here("show", "experts", "--run", "few", "--layer", "block3/moe", "--mesh", "expert=2,data=2")
    assert code == 0 and "inputs b/expert,data s" in output and "block3/moe: 3 experts over expert" in output
    loads = [row.split()[-2] for row in output.splitlines() if row[:1] in "012" and "%" in row][:3]
    assert [int(load) for load in loads] == told["block3/moe/load"]
    config = TrainConfig.read("runs/few/config.json").with_options(mesh={"expert": 2, "data": 2})
    config.write("runs/few/config.json")
    with open("runs/few/events.jsonl", "a") as events:
        events.write(json.dumps({"event": "experts placed", "step": 1, "parts": {"block3/moe": [1, 0, 1]}}) + "\n")
    for mesh, parts in ((), ["1", "0", "1"]), (("--mesh", "expert=2,data=2"), ["0", "0", "1"]):
        _, output, _ = here("show", "experts", "--run", "few", "--layer", "block3/moe", *mesh)
        assert [row.split()[1] for row in output.split("\n\n")[2].splitlines() if row[0] in "012"] == parts, output
    code, _, errors = here("train", "--resume", "--run", "few", "--experts", "4", "--steps", "2")
    assert code == 2 and "was begun with experts 3: experts 4 cannot go on with it" in errors


def test_inspect_lists_experts_and_where_they_are(here):
    code, output, _ = here("inspect", "--model", "gpt-moe-nano", "--experts", "10", "--mesh", "expert=4,data=2")
    assert code == 0
    assert "block0/moe/expert*/w0         d f       10 of 96x192  3 of 96x192" in output
    assert "block0/moe, ..., block7/moe (8 layers): 10 experts over expert" in output
    for part in ("0     0, 1   0-2", "1     2, 3   3-5", "2     4, 5   6, 7", "3     6, 7   8, 9"):
        assert part in output


@pytest.mark.usefixtures("narrow")
def test_ranks_without_experts_are_a_notice(here):
    code, _, errors = here("inspect", "--model", "gpt-moe-nano", "--experts", "3", "--mesh", "expert=4")
    assert code == 0 and "3 experts over expert=4: 1 of 4 parts hold none" in errors
    code, _, errors = here("inspect", "--mesh", "expert=2")
    assert code == 0 and "axis expert=2 shards only the batch, as data would: gpt-nano has no experts" in errors


def test_a_model_without_experts_has_none_to_show(here):
    code, _, errors = here("show", "experts", "--model", "gpt-nano")
    assert code == 2 and "gpt-nano has no layer with experts" in errors


@pytest.mark.soak
@pytest.mark.parametrize("mesh, ranks", [("expert=2", 2), ("expert=4", 4), ("expert=2,model=2,pipe=2", 8)])
def test_ranks_of_mpi_train_alike(ok, tmp_path, mesh, ranks):
    """Ten experts in float64: losses to 1e-9 of one rank's."""
    how = ["--model", "gpt-moe-nano", "--experts", "10", "--dtype", "float64", "--steps", "3", "--batch-size", "4"]
    losses = []
    for number, (axes, run) in {1: ("data=1", "one"), ranks: (mesh, "all")}.items():
        ok(number, "train", *how, *QUIET, *TEXT, "--mesh", axes, "--run", run)
        lines = (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    np.testing.assert_allclose(*losses, rtol=1e-9)
