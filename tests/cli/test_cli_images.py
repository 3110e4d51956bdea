"""Image models by the command line."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from support.command_line import metrics
from support.labelled_images import LABELS, PIXELS, write_folder, write_npz

FEW = ["--model", "convnet", "--steps", "2", "--batch-size", "6", "--data", "a.npz", "--run", "r"]


@pytest.fixture
def images(tmp_path):
    return write_npz(tmp_path / "a.npz")


def test_train_tells_accuracy_and_infer_answers_for_bytes_and_floats(virtual, here, images, tmp_path):
    errors = virtual(2, "train", *FEW, "--mesh", "rows=2").err
    assert "18 images of 6 x 5 x 1 in 3 classes, 5 more held out" in errors
    assert (tmp_path / "runs" / "r" / "data.png").read_bytes().startswith(b"\x89PNG")
    assert here("report", "r")[0] == 0
    assert '<img src="data:image/png;base64,iVBOR' in (tmp_path / "runs" / "r" / "report.html").read_text()
    accuracy = metrics(tmp_path / "runs" / "r")[-1]["validation_accuracy"]
    told = f"accuracy {100 * accuracy:.1f}% ({round(5 * accuracy)} of 5 held out); results in runs/r"
    assert told in errors.splitlines()[-1]
    answers = []
    for inputs in (PIXELS[..., None], PIXELS[..., None] / 255):
        np.save(tmp_path / "x.npy", inputs)
        code, _, errors = here("infer", "--run", "r", "--input", "x.npy", "--output", "y.npy", "--batch-size", "10")
        assert code == 0, errors
        answers.append(np.load(tmp_path / "y.npy"))
    assert answers[0].shape == (len(PIXELS), 3)
    np.testing.assert_allclose(answers[0], answers[1], atol=1e-5)
    write_folder(tmp_path / "pictures")
    (tmp_path / "pictures" / "Thumbs.db").write_text("x")
    for source, order, count in (("pictures", np.argsort(LABELS, kind="stable"), "23"), ("a.npz", range(23), "23")):
        code, _, errors = here("infer", "--run", "r", "--input", source, "--output", "y.npy", "--batch-size", "10")
        assert code == 0 and f"{source}: {count} images" in errors, errors
        assert errors.endswith(f"wrote y.npy: {answers[0].dtype}[{count}, 3]\n")
        np.testing.assert_allclose(np.load(tmp_path / "y.npy"), answers[0][order], atol=1e-5)
    one = ["infer", "--run", "r", "--input", "pictures/class0/03.png", "--output", "y.npy"]
    assert here(*one)[0] == 0
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), answers[0][[3]], atol=1e-5)
    code, _, errors = here("infer", "--run", "r", "--input", "runs/r/config.json", "--output", "y.npy")
    assert code == 2 and "config.json is no image in a format that is read" in errors
    np.save(tmp_path / "x.npy", PIXELS)
    code, _, errors = here("infer", "--run", "r", "--input", "x.npy", "--output", "y.npy")
    assert code == 2 and "has shape (23, 6, 5), but inputs are [b h w c]" in errors and "shape (b, 6, 5, 1)" in errors
    np.save(tmp_path / "x.npy", PIXELS[..., None].astype(int))
    code, _, errors = here("infer", "--run", "r", "--input", "x.npy", "--output", "y.npy")
    assert code == 2 and "--input x.npy: images are int64; save them as uint8" in errors
    np.save(tmp_path / "x.npy", PIXELS[..., None].astype(float))
    code, _, errors = here("infer", "--run", "r", "--input", "x.npy", "--output", "y.npy")
    assert code == 2 and "--input x.npy: the largest pixel is 255, but white is 1 in images of float64" in errors
    np.save(tmp_path / "x.npy", np.zeros_like(PIXELS[..., None]))
    assert here("infer", "--run", "r", "--input", "x.npy", "--output", "y.npy")[0] == 0  # one may well be black


def test_data_show_writes_a_contact_sheet_and_says_what_is_not_read(here, tmp_path):
    write_folder(tmp_path / "pictures")
    (tmp_path / "pictures" / "Thumbs.db").write_text("x")
    code, out, errors = here("data", "show", "pictures", "-n", "2")
    assert code == 0, errors
    first, *classes, note, last = out.splitlines()
    assert first == "pictures: images of 6 x 5 x 1, uint8, 23 file(s)" and classes[0].startswith("class 0 (class0): 7 ")
    assert len(classes) == 3 and all(line.endswith(" more held out") for line in classes)
    assert note == "1 left out: left by an operating system (Thumbs.db)" and last == "wrote contact-sheet.png"
    code, out, _ = here("data", "show", "pictures", "--json", "--output", "other.png")
    assert code == 0 and json.loads(out)["classes"][1]["name"] == "class1" and (tmp_path / "other.png").exists()
    code, _, errors = here("data", "show", "nowhere")
    assert code == 2 and "nowhere: no such file or folder" in errors


@pytest.mark.soak
@pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")
@pytest.mark.parametrize("mesh", ["data=8", "pipe=4,data=2", "model=2,rows=2,data=2", "rows=2,columns=2,data=2"])
def test_convnet_knows_the_digits(ok, mesh, tmp_path):
    ok(8, "train", "--model", "convnet", "--mesh", mesh, "--run", "r", timeout=280)
    assert metrics(tmp_path / "runs" / "r")[-1]["validation_accuracy"] > 0.97


def test_sizes_of_images_are_options_without_data(here):
    code, text, _ = here("inspect", "--model", "convnet", "--images", "9,7,2,5", "--mesh", "rows=2,model=2")
    assert code == 0 and "inputs b h/rows w c" in text and "3x3x2x32" in text and "64x5" in text
    verify = ["verify", "--model", "convnet", "--images", "5,4,2,3", "--steps", "1", "--batch-size", "2"]
    code, text, _ = here(*verify)
    assert code == 0 and "agrees to" in text


@pytest.mark.parametrize(
    "model, images, message",
    [
        ("gpt-nano", "8,8,1,10", "images: gpt-nano is no model of images; choose convnet or"),
        ("convnet", "8,8,1", "images 8,8,1: write height,width,channels,classes, each from 1, as in 28,28,1,10"),
        ("convnet", "8,8,x,10", "images 8,8,x,10: write height,width,channels,classes"),
        ("convnet", "8,8,0,10", "images 8,8,0,10: write height,width,channels,classes, each from 1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(here, model, images, message):
    code, output, errors = here("inspect", "--model", model, "--images", images)
    assert code == 2 and message in errors and not output


def test_help_lists_the_defaults_of_image_models(here):
    _, text, _ = here("train", "--help")
    assert "[default: 600; images: 100]" in " ".join(text.split()) and "scikit-learn's digits" in " ".join(text.split())
