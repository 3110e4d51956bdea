"""Jobs of image models: defaults of their own, sizes that follow from the data, the same on every mesh."""

import json

import numpy as np
import pytest

from spmd_engine import TrainConfig, run_threads, train
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.errors import UsageError
from spmd_engine.training import Observer
from spmd_engine.training.train_config import OF_IMAGES
from support import tiny
from support.labelled_images import LABELS, PIXELS, write_idx, write_npz

SHAPE = {"height": 6, "width": 5, "channels": 1, "classes": 3}
SMALL = {"model": "convnet", "dtype": "float64", "steps": 3, "batch_size": 6, "augment": "shift-flip", "eval_every": 2}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained(folder, data, axes, resume=False, **options):
    job = TrainConfig.of(**SMALL | {"data": str(data), "mesh": axes} | options)
    return run_threads(lambda: train(job, folder, resume=resume).loss, tiny.ranks_of(axes))


# --- defaults


def test_image_models_have_defaults_of_their_own():
    job = TrainConfig.of(model="convnet", steps=7)
    assert {name: job.option(name) for name in OF_IMAGES} == OF_IMAGES | {"steps": 7}
    assert TrainConfig.of(model="gpt-mini", steps=7) == TrainConfig().with_options(model="gpt-mini", steps=7)


def test_json_that_leaves_them_out_means_the_same():
    content = {"version": 1, "model": {"name": "convnet"}, "training": {"steps": 7}}
    assert TrainConfig.from_json(content) == TrainConfig.of(model="convnet", steps=7)
    assert (
        TrainConfig.from_json(TrainConfig.of(model="convnet").with_options(batch_size=16).as_json()).data.batch_size
        == 16
    )
    with pytest.raises(UsageError, match="training: it must be an object"):
        TrainConfig.from_json(content | {"training": 3})


@pytest.mark.parametrize(
    "name, images, message",
    [
        ("gpt-nano", SHAPE, "gpt-nano is no model of images; choose convnet or"),
        ("convnet", {"height": 6}, "it must have height, width, channels, classes, from 1"),
        ("convnet", SHAPE | {"classes": 0}, "it must have height, width, channels, classes, from 1"),
        ("convnet", SHAPE | {"height": 1.5}, "it must map names to whole numbers"),
    ],
)
def test_sizes_of_images_are_checked(name, images, message):
    with pytest.raises(UsageError, match=message):
        ModelConfig(name, images=images)


# --- training


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Data, and the run of one rank on them."""
    folder = tmp_path_factory.mktemp("alone")
    write_idx(folder / "data", held_out=7)
    trained(folder / "run", folder / "data", {"data": 1})
    return folder


@pytest.mark.parametrize("axes", [{"rows": 2, "columns": 2}, {"pipe": 2, "model": 2}], ids=tiny.mesh_id)
def test_every_mesh_computes_the_same_and_measures_it_exactly(alone, tmp_path, axes):
    trained(tmp_path / "run", alone / "data", axes)
    for ours, theirs in zip(lines(tmp_path / "run"), lines(alone / "run"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
        assert ours.get("accuracy") == theirs.get("accuracy") and ("accuracy" in ours) == ("grad_norm" in ours)
        if "validation_loss" in theirs:
            assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-9)
            assert ours["validation_accuracy"] == theirs["validation_accuracy"]
    accuracy = ours["validation_accuracy"] * 7
    assert accuracy == pytest.approx(round(accuracy), abs=1e-9)  # of seven images


def test_the_model_has_the_sizes_of_the_data_and_the_run_says_so(alone):
    job = TrainConfig.read(alone / "run" / "config.json")
    assert job.model.images == SHAPE and job.corpus.files == 4
    assert len([line for line in lines(alone / "run") if "validation_accuracy" in line]) == 2  # after 2 steps and 3


def test_a_run_goes_on_where_it_was_broken_off(alone, tmp_path):
    trained(tmp_path / "run", alone / "data", {"data": 2}, steps=3)
    job = TrainConfig.of(**SMALL | {"data": str(alone / "data")})
    train(job, tmp_path / "parts", stop_at=1)
    read = TrainConfig.read(tmp_path / "parts" / "config.json")
    run_threads(lambda: train(read.resumed(mesh={"rows": 2}), tmp_path / "parts", resume=True), 2)
    ours, theirs = ([line["loss"] for line in lines(tmp_path / name)] for name in ("parts", "run"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)


# --- data that do not fit


def test_a_run_goes_on_with_the_same_images_alone(alone, tmp_path):
    job = TrainConfig.read(alone / "run" / "config.json").resumed(data=str(write_npz(tmp_path / "a.npz")), steps=4)
    with pytest.raises(UsageError, match=r"a.npz: other files than the job was made for \(SHA-256 differs\)"):
        train(job, alone / "run", resume=True)


@pytest.mark.parametrize("x, y", [(PIXELS[:, 1:], LABELS), (PIXELS, LABELS + (LABELS == 2))], ids=["size", "classes"])
def test_images_that_a_model_is_not_for_are_refused(tmp_path, x, y):
    data = write_npz(tmp_path / "a.npz", x=x, y=y)
    with pytest.raises(UsageError, match="classes, but the model is for images of 6 x 5 x 1 in 3 classes"):
        train(TrainConfig.of(**SMALL, data=str(data), images=SHAPE), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_may_have_more_classes_than_the_data(tmp_path):
    data = write_npz(tmp_path / "a.npz")
    train(TrainConfig.of(**SMALL | {"steps": 1}, data=str(data), images=SHAPE | {"classes": 4}), tmp_path / "run")
    assert TrainConfig.read(tmp_path / "run" / "config.json").model.images["classes"] == 4


def test_text_is_not_shifted(tmp_path):
    with pytest.raises(UsageError, match="--augment shift: mlp learns from no images; leave it out"):
        train(TrainConfig.of(model="mlp", augment="shift"), tmp_path / "run")


@pytest.mark.parametrize("option, value", [("documents", "apart"), ("length", 5)])
def test_images_are_no_documents(tmp_path, option, value):
    with pytest.raises(UsageError, match=f"--{option} {value}: convnet learns from no file of tokens; leave it out"):
        train(TrainConfig.of(**{"model": "convnet", option: value}), tmp_path / "run")


def test_what_is_noted_is_of_the_data_s_sizes(tmp_path):
    class Notices(Observer):
        def opened(self, workload, parameters, notices):
            told.append(notices)

    for height, noted in ((4, True), (40, False)):
        told = []
        x = np.full((6, height, 4), 200, np.uint8)
        data = write_npz(tmp_path / f"{height}.npz", x=x, y=np.arange(6) % 2)
        job = TrainConfig.of(**SMALL | {"steps": 1, "data": str(data), "mesh": {"rows": 4}})
        run_threads(lambda job=job, height=height: train(job, tmp_path / str(height), observers=[Notices()]), 4)
        assert [any("so thin" in notice for notice in notices) for notices in told] == [noted]
