"""A job in a file is what commands look at, with what else their options say."""

import pytest

from spmd_engine.training import TrainConfig

pytestmark = pytest.mark.usefixtures("narrow")


@pytest.fixture
def write(tmp_path):
    def write(**options):
        TrainConfig.of(**options).write(tmp_path / "job.json")

    return write


def test_inspect_and_show_look_at_the_job(here, write):
    write(model="gpt-moe-nano", mesh={"expert": 3, "data": 2}, experts=5, top_k=3, zero=2, steps=77)
    of_job = here("inspect", "--config", "job.json")
    by_hand = ["--model", "gpt-moe-nano", "--mesh", "expert=3,data=2", "--experts", "5", "--top-k", "3", "--zero", "2"]
    assert of_job == here("inspect", *by_hand) and of_job[0] == 0
    assert here("inspect", "--config", "job.json", "--zero", "0") == here("inspect", *by_hand[:-1], "0")
    code, out, _ = here("show", "communication", "--config", "job.json", "--rank", "1")
    assert code == 0 and "reduce_scatter" in out


def test_images_are_of_the_job_s_sizes(here, write):
    write(model="convnet", images={"height": 9, "width": 7, "channels": 2, "classes": 3}, mesh={"rows": 2})
    by_hand = ["--model", "convnet", "--images", "9,7,2,3", "--mesh", "rows=2"]
    assert here("inspect", "--config", "job.json") == here("inspect", *by_hand)


def test_verify_proves_the_job(here, write):
    write(model="gpt-moe-nano", experts=3, capacity_factor=1.0, batch_size=4, micro_batches=2, steps=600)
    code, out, _ = here("verify", "--config", "job.json", "--steps", "1", "--length", "8")
    assert code == 0 and "gpt-moe-nano on mesh data=1" in out and "agrees" in out
    write(model="mlp", strategy="data-parallel", mesh={"data": 1})
    assert here("verify", "--config", "job.json", "--steps", "1")[0] == 0


def test_a_file_that_is_no_job_is_one_line(here, tmp_path):
    (tmp_path / "job.json").write_text("[]")
    code, _, errors = here("inspect", "--config", "job.json")
    assert code == 2 and errors.count("\n") == 1 and "job.json" in errors
