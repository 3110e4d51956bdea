"""Requests to a running job that were altered at random: the job answers each by one event, and computes the same."""

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from test_shape_changes import events, small_job

from spmd_engine import Mesh, run_threads, train
from spmd_engine.adaptive import ShapeRequest
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.engine.parallel_config import ParallelConfig
from support.altered import in_bytes, in_json, in_words
from support.random_jobs import losses_in

SHAPES = [
    ShapeRequest({"mesh": {"data": 3}, "zero": 0, "shares": None}),
    ShapeRequest({"mesh": {"data": 3}, "zero": 3, "shares": "data=2:1:1"}),
    ShapeRequest({"mesh": {"data": 2}, "zero": 1}, ranks=[0, 2]),
    ShapeRequest({"mesh": {"model": 2}}, protocol="live", within=600.0),
    ShapeRequest({"mesh": {"model": 3}, "zero": None}),
    ShapeRequest({"mesh": {"pipe": 2}, "stages": "0,2"}, ranks=[0, 1]),
    ShapeRequest({"mesh": {"pipe": 2, "model": [1, 2]}}),
    ShapeRequest({"mesh": {"data": 1}}, protocol="checkpoint-based"),
]
ALL = ParallelConfig(mesh={"data": 3}).as_json() | {"offload": "optimizer", "offload_dir": ".", "compress": "none"}
WHOLE = ShapeRequest(ALL, ranks=[0, 1, 2], model="mlp", id="one", within=60.0, experts={"hidden": [0, 1]}).as_json()
SIZES = [10**9, 10**14, 10**30, 0, -3, True, 2.0, "1" + 30 * "0", [1, 2], [], [[1]], ["a", None, {}], "²", "1|", {}]
MESHES = ["data=²", "model=0|3", "pipe=2,model=0|3", "order=3", "data=1" + "0" * 30, "data=" + "9" * 5000]
#: Contents that no random alteration makes.
CONTENTS = [
    *({"composition": {"mesh": {axis: size}}} for size in SIZES for axis in ("data", "model")),
    *({"composition": {"mesh": {"pipe": 2, "model": size}}} for size in ([0, 3], [1, 10**20], [1, "2"], [1, 2, 3])),
    *({"composition": {"mesh": mesh}} for mesh in MESHES),
    *({"composition": {"mesh": {name: 3}}} for name in ("order", "check", "", "data\0", "data=1,model", 99 * "x")),
    *({"composition": {"zero": 1}, "experts": experts} for experts in ({"block0": 3}, [3], {"a": ["b"]}, {"": [[]]})),
    {"composition": {"offload": "optimizer", "offload_dir": "a\0b"}},
    {"composition": {"mesh": {"pipe": 2}, "schedule": "interleaved", "chunks": 10**18}},
    {"composition": {"mesh": {"pipe": 2}, "overlap_layers": "9" * 4000}},
    {"composition": {"shares": "data=1:1:" + "9" * 90}},
    {"composition": {"rank_order": "1," * 999 + "0"}},
    {"composition": {"x" * 500_000: 1}},
    {"composition": {}, "ranks": [*range(10_000)]},
    {"composition": {}, "at": 10**9, "id": "late"},
    {"composition": {}, "within": float("nan"), "protocol": "live"},
]  # fmt: skip
TEXTS = [
    b"", b"\0", b"null", b"[]", b'{"composition": {}, "composition": 3}', b"[" * 100_000, b'{"a":' * 100_000,
    b" " * (2 << 20), json.dumps(WHOLE).encode("utf-16"), b"\xff\xfe", b"9" * 5000, b'{"composition": {"zero": 1e999}}',
]  # fmt: skip


class Requests:
    """Puts a request into the run's folder after each step, unless one waits there: see ``train(propose=...)``."""

    def __init__(self, folder, seed, count):
        self.file, self.rng, self.left = folder / ShapeRequest.FILE, random.Random(seed), count
        self.kinds = []  #: of each request, in order
        self.given = [*CONTENTS, *TEXTS]
        self.rng.shuffle(self.given)

    def __call__(self, step):
        if self.file.is_dir() and not self.file.is_symlink():
            shutil.rmtree(self.file)  # it is answered, but the job does not remove it
        elif not os.path.lexists(self.file) and self.left:
            self.left -= 1
            self.kinds.append(self._put(step))

    def _put(self, step):
        rng, path = self.rng, self.file.with_name("next")
        kind = rng.choice(["shape", "altered", "altered", "given", "given", "no file"])
        if kind == "shape":
            content = json.dumps(rng.choice(SHAPES).as_json()).encode()
        elif kind == "altered":
            content = json.dumps(in_json(rng.choice([WHOLE, SHAPES[0].as_json()]), rng)).encode()
            content = rng.choice([in_words, in_bytes, lambda content, rng: content])(content, rng)
        elif kind == "given" and self.given:
            content = self.given.pop()
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
        else:
            rng.choice([os.mkfifo, os.mkdir, lambda path: os.symlink(rng.choice(["nowhere", path]), path)])(path)
            os.rename(path, self.file)
            return "no file"
        path.write_bytes(content)
        os.replace(path, self.file)
        return kind


def assert_answers_all(folder, ranks, seed, count):
    """The job answers each request, takes the shapes that are possible, and computes what an undisturbed job does."""
    with Mesh() as mesh:
        run = Path(text_from_rank_zero(mesh.group(), lambda: str(folder)), "run")
        options = {"optimizer": "sgd", "eval_every": 0, "save_every": 0, "check_replicas_every": 0, "timeout": 120.0}
        job = small_job(folder, steps=3 * count // 2 + 30, mesh={"data": ranks}, **options)
        requests = Requests(run, seed, count)
        train(job, run, propose=requests)
        if mesh.rank == 0:
            answers = events(run, "reshaped", "not reshaped", "estimated")
            assert len(answers) == count == len(requests.kinds), (answers, requests.kinds)
            assert all("\n" not in each.get("why", "") for each in answers)
            for kind, answer in zip(requests.kinds, answers, strict=True):
                if kind == "shape":
                    assert answer["event"] == "reshaped" or answer["why"].startswith("the job has this shape"), answer
                elif kind in ("no file", "given"):
                    assert answer["event"] == "not reshaped", answer
            assert len({each["after"] for each in answers if "after" in each}) > 4
            assert all(each["request"] == "late" for each in answers if "the run ends after" in each.get("why", ""))
            run_threads(lambda: train(job.with_options(mesh={"data": 1}), folder / "alone"), 1)
            ours, theirs = losses_in(run), losses_in(folder / "alone")
            assert ours.keys() == theirs.keys()
            np.testing.assert_allclose([*ours.values()], [*theirs.values()], rtol=1e-10)
        mesh.barrier()


def test_a_job_on_virtual_ranks_answers_altered_requests(tmp_path):
    run_threads(lambda: assert_answers_all(tmp_path, 3, seed=6, count=40), 3)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.mpi(ranks=4, timeout_s=800)
def test_a_job_of_mpi_ranks_answers_500_altered_requests():
    with tempfile.TemporaryDirectory() as folder:
        assert_answers_all(Path(folder), 4, seed=2, count=500)
