"""Jobs in JSON that were altered at random: they are read, and can be inspected, or one line says what is wrong."""

import json
import random

import pytest

from spmd_engine.cli import main
from spmd_engine.errors import UsageError
from spmd_engine.training.train_config import TrainConfig
from support.altered import in_bytes, in_json

pytestmark = pytest.mark.usefixtures("narrow")

JOBS = [
    TrainConfig.of(model="mlp", mesh={"data": 2, "model": 2}, zero=1, steps=3, data="texts"),
    TrainConfig.of(model="gpt-nano", mesh={"pipe": 2, "context": 2}, schedule="interleaved", chunks=2, stages="cost"),
    TrainConfig.of(model="gpt-moe-nano", mesh={"expert": 2}, experts=6, top_k=2, dense_layers="0"),
    TrainConfig.of(model="convnet", mesh={"rows": 2, "data": 1}),
]


def altered(seed):
    """A file's content: a job, changed in one place or two, as JSON or as bytes."""
    rng = random.Random(seed)
    content = rng.choice(JOBS).as_json()
    if rng.random() < 0.2:
        return in_bytes(json.dumps(content).encode(), rng)
    for _ in range(rng.choice([1, 1, 2])):
        content = in_json(content, rng)
    return json.dumps(content).encode()


MANY = [pytest.param(begin, 250, marks=pytest.mark.soak) for begin in range(30, 2030, 250)]


@pytest.mark.parametrize(("begin", "count"), [(0, 30), *MANY])
def test_a_job_that_was_altered_is_read_or_is_one_line(tmp_path, capsys, begin, count):
    path, refused = tmp_path / "job.json", 0
    for seed in range(begin, begin + count):
        path.write_bytes(altered(seed))
        try:
            job = TrainConfig.read(path)
        except UsageError as error:
            assert str(path) in str(error) and "\n" not in str(error), seed
            refused += 1
            continue
        assert TrainConfig.from_json(json.loads(json.dumps(job.as_json()))) == job, seed
        try:
            main(["inspect", "--config", str(path)])
        except SystemExit as left:
            said = [line for line in capsys.readouterr().err.splitlines() if ": note: " not in line]
            assert left.code == 2 and len(said) == 1 and said[0].startswith("spmd_engine: "), (seed, said)
    assert count // 5 < refused < count


def test_json_that_has_no_end_is_one_line(tmp_path):
    (tmp_path / "job.json").write_text('{"model": ' + "[" * 100_000)
    with pytest.raises(UsageError, match="cannot be read as JSON"):
        TrainConfig.read(tmp_path / "job.json")


def test_half_of_a_surrogate_pair_is_refused_where_it_is_read(tmp_path):
    job = JOBS[0].as_json()
    (tmp_path / "job.json").write_text(json.dumps({**job, "data": {**job["data"], "path": "texts \ud83d\ude00"}}))
    assert TrainConfig.read(tmp_path / "job.json").data.path == "texts \U0001f600"
    (tmp_path / "job.json").write_text(json.dumps({**job, "data": {**job["data"], "path": "texts \ud800"}}))
    with pytest.raises(UsageError, match="cannot be read as JSON: .*surrogates not allowed"):
        TrainConfig.read(tmp_path / "job.json")
