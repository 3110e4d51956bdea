"""What a rank holds, measured by the kernel: as much as ``inspect`` says under each stage of ZeRO, and ``analyze``
of a whole run."""

import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.soak  # it takes hundreds of megabytes to tell them from what a process holds besides
PROGRAM = Path(__file__).with_name("memory_of_ranks.py")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_of_a_rank(mpi_run, zero):
    """Parameters, gradients and optimizer state, in parts or not, and the largest gathered groups: within 5%.

    By PSS, which counts a page that several ranks share by their parts; freed memory is kept, so that it is a peak.
    """
    facts = _facts(mpi_run(2, PROGRAM, zero, env={"OMP_NUM_THREADS": "1"}, timeout=120))
    assert np.mean(facts["held"]) == pytest.approx(np.mean(facts["expected"]), rel=0.05), facts


def test_memory_of_a_whole_run(mpi_run):
    """Evaluations, saves and the sample need no more than the steps, whose prediction is within 20%: beside arrays, the
    allocator holds pieces that no later array fits into. The sample loads parts of libraries, of files."""
    facts = _facts(mpi_run(3, PROGRAM, "run", env={"OMP_NUM_THREADS": "1"}, timeout=240))
    assert np.mean(facts["held"]) == pytest.approx(np.mean(facts["expected"]), rel=0.2), facts
    assert facts["at_end"] < 4 << 20, facts


def _facts(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
