"""Jobs that a seed draws, trained in legs on meshes that it draws, too: each computes what one rank computes."""

import pytest

from support.random_jobs import check_job

SHORT = (24,)  #: a mixture of experts, with a move to another mesh


@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n in SHORT else pytest.mark.soak) for n in range(150)])
def test_a_job_computes_what_one_rank_computes(tmp_path, seed):
    refused, job = check_job(seed, tmp_path)
    if refused:
        pytest.skip(f"{refused[0]}: {job}")
