"""What a rank holds under each stage of ZeRO: as much as ``show memory`` says, measured by the kernel."""

import json
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("memory_of_ranks.py")


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.soak) for zero in (0, 1, 2)), 3])
def test_memory_of_a_rank(mpi_run, zero):
    """Parameters, gradients and optimizer state, in parts or not, and the largest gathered groups: within 5%.

    By PSS, which counts a page that several ranks share by their parts; freed memory is kept, so that it is a peak.
    """
    result = mpi_run(2, PROGRAM, zero, env={"OMP_NUM_THREADS": "1"}, timeout=120)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout.splitlines()[-1])
    assert np.mean(facts["held"]) == pytest.approx(np.mean(facts["expected"]), rel=0.05), facts
