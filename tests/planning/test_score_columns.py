"""The reader of tables that nobody prepared for."""

import pytest

from script_module import script

Columns = script("score_columns").Columns
ROW = {"Num_Layers": "24", "d_model": "1024", "heads": "16", "gbs": "32", "TP": "2", "step_ms": "250", "note": "x"}


def test_columns_are_known_by_their_usual_names():
    columns = Columns.of(list(ROW))
    assert not columns.missing and columns.unused == ["note"]
    assert columns.assumed == {"sequence": 2048, "vocabulary": 51200, "dp": 1, "pp": 1}
    run = columns.run(ROW)
    assert (run["layers"], run["hidden"], run["tp"], run["micro_batch"], run["seconds"]) == (24, 1024, 2, 32, 0.25)


@pytest.mark.parametrize("change", [{"gbs": "OOM"}, {"heads": "0"}, {"heads": "3"}, {"step_ms": ""}])
def test_rows_that_make_no_sense_are_none(change):
    assert Columns.of(list(ROW)).run(ROW | change) is None


def test_what_no_column_tells_is_named():
    assert Columns.of(["gpus", "memory_gb"]).missing == ["hidden", "layers", "heads", "global_batch", "a step's time"]
