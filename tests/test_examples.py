"""The programs in examples/ run and learn."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_an_engine_of_one_s_own_learns(mpi_run, tmp_path, ranks):
    environment = {"OMP_NUM_THREADS": "1"}
    result = mpi_run(ranks, EXAMPLES / "own_engine.py", "100", cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert losses[-1] < losses[0] < 3.2 and losses[-1] < 2.7  # from 5.5
    assert (tmp_path / "runs" / "bigram" / "checkpoints" / "latest" / "manifest.json").exists()


def test_virtual_ranks(mpi_run, tmp_path):
    result = mpi_run(1, EXAMPLES / "virtual_ranks.py", cwd=tmp_path)
    assert len(result.stdout.splitlines()) == 4
    assert "'sum over data': [4.0, 4.0]" in result.stdout.splitlines()[3]


def test_two_shards_classify_and_keep_nothing(mpi_run, tmp_path):
    result = mpi_run(2, EXAMPLES / "two_shards.py", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("100% right") == 3
    told = re.findall(r"rank (\d) held ([\d,]+) bytes of features; of this batch it keeps (-?[\d,]+)", result.stdout)
    assert sorted(rank for rank, _, _ in told) == ["0"] * 2 + ["1"] * 2
    assert all(int(held.replace(",", "")) == 100 * 15 * 15 * 2 * 4 for _, held, _ in told)
    assert all(int(kept.replace(",", "")) < 5_000 for _, _, kept in told)
