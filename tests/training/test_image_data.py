"""Images to learn from: every rank finds the same, whatever the format, and bad ones are one line on all ranks."""

from importlib.util import find_spec
from zipfile import ZipFile

import numpy as np
import pytest
from PIL import Image

from spmd_engine import Mesh, run_threads
from spmd_engine.errors import UsageError
from spmd_engine.models import ImageShape
from spmd_engine.strategies import DataParallel
from spmd_engine.training.data.images import ImageData, as_floats, load_images
from support import tiny
from support.labelled_images import CLASSES, LABELS, PIXELS, H, N, W, idx, write_folder, write_idx, write_npz


class Cut(DataParallel):
    """Cuts images, whatever their dims."""

    input_sharding = output_sharding = "b/data"


def load(path, ranks=1):
    def program():
        with Mesh() as mesh:
            return load_images(mesh.group(), path and str(path))

    return run_threads(program, ranks)


# --- what is read


@pytest.mark.parametrize("write", [write_idx, write_npz, write_folder])
def test_every_rank_finds_the_same_in_each_format(tmp_path, write):
    found = load(write(tmp_path / "a.npz" if write is write_npz else tmp_path), 3)
    order = np.argsort(LABELS, kind="stable") if write is write_folder else np.arange(N)
    for images in found:
        np.testing.assert_array_equal(images.x[:], PIXELS[order][..., None])
        np.testing.assert_array_equal(images.y, LABELS[order])
        assert images.sha256 == found[0].sha256 and images.held_out.tolist() == found[0].held_out.tolist()
        assert images.shape == ImageShape(H, W, 1, CLASSES)
        assert images.files == {write_idx: 2, write_npz: 1, write_folder: N}[write]


def test_what_is_not_compressed_is_mapped_by_every_rank(tmp_path):
    write_idx(tmp_path / "raw"), write_idx(tmp_path / "gz", compressed=True)
    raw, compressed = load(tmp_path / "raw", 2), load(tmp_path / "gz", 2)
    assert all(isinstance(images.x.parts[0], np.memmap) for images in raw)
    assert not any(isinstance(images.x.parts[0], np.memmap) for images in compressed)
    (other,) = load(write_npz(tmp_path / "a.npz"))
    assert {images.sha256 for images in (*raw, *compressed, other)} == {other.sha256}


def test_the_same_fifth_is_held_out_whatever_the_pixels_and_the_seed(tmp_path):
    (images,) = load(write_npz(tmp_path / "a.npz"))
    (others,) = load(write_npz(tmp_path / "b.npz", x=PIXELS[::-1], y=LABELS))
    assert len(images.held_out) == 5 == -(-N // 5) and images.held_out.tolist() == others.held_out.tolist()
    assert all(ImageData(images, seed=seed).held_out.tolist() == images.held_out.tolist() for seed in (0, 1))


def test_the_files_own_test_part_is_held_out(tmp_path):
    (images,) = load(write_idx(tmp_path, held_out=4))
    assert images.held_out.tolist() == [N - 4, N - 3, N - 2, N - 1] and images.files == 4
    np.testing.assert_array_equal(images.x[N - 6 :], PIXELS[N - 6 :, ..., None])
    parts = {"x_train": PIXELS[:-4], "y_train": LABELS[:-4, None], "x_test": PIXELS[-4:], "y_test": LABELS[-4:, None]}
    (other,) = load(write_npz(tmp_path / "a.npz", **parts))
    assert other.sha256 == images.sha256


def test_parts_of_a_folder_are_held_out_and_what_is_not_read_is_in_the_line_of_the_data(tmp_path):
    write_folder(tmp_path / "train"), write_folder(tmp_path / "val")
    for label in (0, 1):
        for path in sorted((tmp_path / "val" / f"class{label}").iterdir())[2:]:
            path.unlink()
    (tmp_path / "notes.txt").write_text("x")
    one, other = load(tmp_path, 2)
    assert one.held_out.tolist() == list(range(N, N + 11)) and one.names == ["class0", "class1", "class2"]
    assert (
        str(one)
        == str(other)
        == ("23 images of 6 x 5 x 1 in 3 classes, 11 more held out; 1 left out: in no class's folder (notes.txt)")
    )


def test_grey_of_16_bits_has_white_at_its_largest_number(tmp_path):
    for label, value in enumerate((0, 65535)):
        (folder := tmp_path / f"class{label}").mkdir()
        for number in range(5):
            Image.fromarray(np.full((H, W), value, np.uint16)).save(folder / f"{number}.png")
    (images,) = load(tmp_path)
    x, y = ImageData(images).examples(np.arange(8))
    np.testing.assert_array_equal(x[:, 0, 0, 0], y)


def test_files_beside_those_of_idx_are_named(tmp_path):
    write_idx(tmp_path, held_out=4), write_idx(tmp_path, compressed=True)
    (tmp_path / "README.md").write_text("x")
    (images,) = load(tmp_path)
    assert images.notes == [
        "3 left out: beside the files that are read (README.md, train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz)"
    ]


def test_arrays_that_are_not_read_are_named(tmp_path):
    (images,) = load(write_npz(tmp_path / "a.npz", x=PIXELS, y=LABELS, z=LABELS, x_val=PIXELS))
    assert images.notes == ["arrays that are not read: x_val, z"]


def test_an_archive_of_pictures_is_to_be_unpacked(tmp_path):
    with ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("cats/1.png", b"x")
    with pytest.raises(UsageError, match="a.zip: it is a zip file, but no .npz file of arrays; unpack it, and name"):
        load(tmp_path / "a.zip")


def test_a_table_is_read_by_its_name(tmp_path):
    write_folder(tmp_path)
    paths = [path.relative_to(tmp_path) for path in sorted(tmp_path.rglob("*.png"))]
    (tmp_path / "labels.csv").write_text("path,label\n" + "".join(f"{path},{path.parent}\n" for path in paths))
    (by_table,), (by_folder,) = load(tmp_path / "labels.csv"), load(tmp_path)
    assert by_table.sha256 == by_folder.sha256 and by_table.names == by_folder.names
    assert not by_table.notes and by_folder.notes == ["1 left out: in no class's folder (labels.csv)"]


@pytest.mark.parametrize("changed", ["pixel", "class", "held out"])
def test_the_digest_is_of_all_that_decides_what_is_learnt(tmp_path, changed):
    (images,) = load(write_npz(tmp_path / "a.npz"))
    x, y = PIXELS.copy(), LABELS.copy()
    x[9, 0, 0] += changed == "pixel"
    y[9] = 1 if changed == "class" else y[9]
    if changed == "held out":
        other = load(write_npz(tmp_path / "b.npz", x_train=x[:-4], y_train=y[:-4], x_test=x[-4:], y_test=y[-4:]))[0]
    else:
        other = load(write_npz(tmp_path / "b.npz", x=x, y=y))[0]
    assert other.sha256 != images.sha256


@pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_the_digits_are_there_by_default():
    (images,) = load(None)
    assert images.x.shape == (1797, 8, 8, 1) and len(images.held_out) == 360
    assert np.bincount(images.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as UCI counts them
    assert images.x[:].max() == 1 and images.x[:].mean() * 16 == pytest.approx(4.884165, abs=1e-5)


def test_without_scikit_learn_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr("spmd_engine.training.data.images.find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"scikit-learn is not installed: pip install 'spmd_engine\[images\]', or give"
    ):
        load(None)


# --- what is refused


def spoiled(tmp_path, how):
    """A path to images that make no sense."""
    good, (folder, file) = {"x": PIXELS, "y": LABELS}, (tmp_path / "idx", tmp_path / "a.npz")
    if how == "cut short":
        (write_idx(folder) / "train-images-idx3-ubyte").write_bytes(idx(PIXELS)[:-3])
    elif how == "without classes":
        (write_idx(folder) / "train-labels-idx1-ubyte").unlink()
    elif how == "sizes apart":
        (write_idx(folder, held_out=3) / "t10k-images-idx3-ubyte").write_bytes(idx(PIXELS[-3:, :-1]))
    elif how == "a class of its own":
        (write_idx(folder, held_out=3) / "t10k-labels-idx1-ubyte").write_bytes(idx([0, 1, CLASSES]))
    elif how == "a damaged picture":
        file = write_folder(folder) / "class1" / "04.png"
        file.write_bytes(file.read_bytes()[:70])
        return folder
    elif how == "pictures of two sizes":
        file = write_folder(folder) / "class1" / "04.png"
        with Image.open(file) as picture:
            picture.resize((9, 9)).save(file)
        return folder
    elif how == "no images":
        file.write_text("some text")
    else:
        change = {
            "a class too few": {"y": LABELS[:-1]},
            "below 0": {"y": LABELS.astype(int) - 1},
            "out of range": {"y": LABELS.astype(int) * 100},
            "no whole numbers": {"y": LABELS / 2},
            "whole numbers of 64 bits": {"x": PIXELS.astype(int)},
            "flat": {"x": PIXELS.reshape(N, -1)},
            "channels first": {"x": np.zeros((N, 3, 6, 6), np.uint8)},
            "not a number": {"x": np.where(np.arange(N) == 7, np.nan, PIXELS.T / 255).T},
            "none": {"x": PIXELS[:0], "y": LABELS[:0]},
            "one": {"x": PIXELS[:1], "y": LABELS[:1]},
            "bytes as floats": {"x": PIXELS.astype(np.float32)},
            "12 bits of 16": {"x": PIXELS.astype(np.uint16) * 16},
            "0 and 1 as bytes": {"x": PIXELS // 128},
            "one class": {"y": np.full(N, 2)},
            "other names": {"pixels": PIXELS},
            "held out without classes": {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS},
        }[how]
        write_npz(file, **(good | change if change.keys() <= good.keys() else change))
    return file if file.exists() else folder


BAD = {
    "cut short": "train-images-idx3-ubyte: its header says 23 x 6 x 5, 690 bytes, but 687 follow",
    "without classes": "train-images.* and train-labels.* go together, and one is missing",
    "sizes apart": r"t10k-images-idx3-ubyte: held-out images are uint8 of shape \(5, 5\), but training images are",
    "a class of its own": "t10k-images-idx3-ubyte: classes from 0 to 3, but .* those learnt from end at 2",
    "a damaged picture": "class1/04.png is damaged or cannot be read: .*Replace or remove it",
    "pictures of two sizes": "class1/04.png: 9 x 9 pixels, but those before have 5 x 6.*scale or crop them first",
    "no images": r"a.npz: not images in a format known here: a folder of IDX files",
    "a class too few": r"a.npz: 23 images, but classes of shape \(22,\)",
    "below 0": "a.npz: classes from -1 to 1, but they are numbers from 0",
    "out of range": "a.npz: classes from 0 to 200, but .* 23 images can have no more than 22",
    "no whole numbers": "a.npz: classes are float64; they must be whole numbers",
    "whole numbers of 64 bits": r"a.npz: images are int64; save them as uint8 \(0 to 255\), uint16, or floats",
    "flat": r"a.npz: images of shape \(23, 30\); save some as \[n h w\]",
    "channels first": r"a.npz: images of shape \(23, 3, 6, 6\) have channels first; save x.transpose\(0, 2, 3, 1\)",
    "not a number": "a.npz: image 7, counted from 0, has pixels that are not finite",
    "none": r"a.npz: images of shape \(0, 6, 5\); save some",
    "one": "a.npz: 1 images, too few to train on some and hold out others",
    "held out without classes": "a.npz: it has no y_test, which is needed with its held-out arrays",
    "bytes as floats": "a.npz: the largest pixel is 255, but white is 1 in images of float32; divide the pixels",
    "12 bits of 16": "a.npz: the largest pixel is 4080, but white is 65535 in images of uint16; divide",
    "0 and 1 as bytes": "a.npz: the largest pixel is 1, but white is 255 in images of uint8; divide",
    "one class": "a.npz: all images are of class 2; give images of other classes, too",
    "other names": "a.npz: it has the arrays pixels; call images x and their classes y",
}


@pytest.mark.parametrize("how", BAD)
def test_what_makes_no_sense_is_one_line_on_every_rank(tmp_path, how):
    path = spoiled(tmp_path, how)

    def program():
        with Mesh() as mesh, pytest.raises(UsageError, match=BAD[how]) as caught:
            load_images(mesh.group(), str(path))
        return str(caught.value)

    said = run_threads(program, 2)
    assert said[0] == said[1] and "\n" not in said[0]


def test_floats_with_mean_0_and_variance_1_are_taken_as_they_are(tmp_path):
    x = ((PIXELS - PIXELS.mean()) / PIXELS.std()).astype(np.float32)
    (images,) = load(write_npz(tmp_path / "a.npz", x=x, y=LABELS))
    np.testing.assert_array_equal(images.x[:][..., 0], x)


def test_a_file_that_one_rank_cannot_see_is_an_error_on_all(tmp_path, monkeypatch):
    from spmd_engine.comm.world import world
    from spmd_engine.formats.tensor import MappedArray

    opened = MappedArray.open

    def open_but_on_rank_two(self):
        if world().rank == 2:
            raise UsageError("no such file here")
        return opened(self)

    path = write_npz(tmp_path / "a.npz")
    monkeypatch.setattr(MappedArray, "open", open_but_on_rank_two)

    def program():
        with Mesh() as mesh, pytest.raises(UsageError, match="rank 2 of 3: no such file here"):
            load_images(mesh.group(), str(path))

    run_threads(program, 3)


# --- as samples


def batches(path, axes, steps, **options):
    """Places and inputs of some steps' samples, all ranks' together, in order."""

    def program():
        with Mesh(**axes) as mesh:
            engine = Cut(2, 3, mesh)
            data = ImageData(load_images(mesh.group(), str(path)), **options)
            made = [data.batch(engine, step, size=6) for step in steps]
            return [(micro.samples, micro.inputs, micro.targets) for batch in made for micro in batch.micro_batches]

    ranks = run_threads(program, tiny.ranks_of(axes))
    return [[np.concatenate([rank[i][part] for rank in ranks]) for part in range(3)] for i in range(len(steps))]


@pytest.mark.parametrize("augment", ["none", "shift", "shift-flip"])
def test_samples_are_those_of_one_rank_on_every_mesh_and_after_a_resume(tmp_path, augment):
    write_idx(tmp_path, held_out=5)
    alone = batches(tmp_path, {"data": 1}, range(8), augment=augment, seed=3)  # more than two epochs
    for ours, theirs in zip(batches(tmp_path, {"data": 4}, [5, 7], augment=augment, seed=3), alone[5::2], strict=False):
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(mine, other)


def test_samples_are_floats_from_0_to_1_with_their_classes(tmp_path):
    write_idx(tmp_path)
    (images,) = load(tmp_path)
    with Mesh() as mesh:
        data = ImageData(images, dtype=np.float64, seed=1)
        (micro,) = data.batch(Cut(2, 3, mesh), 1, size=7).micro_batches
        numbers = data.numbers(np.arange(7, 14))
        held_out = data.validation_batches(Cut(2, 3, mesh), size=4)
    np.testing.assert_array_equal(micro.inputs, PIXELS[numbers][..., None] / 255)
    np.testing.assert_array_equal(micro.targets, LABELS[numbers])
    assert micro.inputs.dtype == np.float64 and not set(numbers) & set(images.held_out)
    assert sum(len(batch.micro_batches[0].inputs) for batch in held_out) == 5 == -(-N // 5)


@pytest.mark.parametrize("dtype, largest", [("u1", 255), ("u2", 65535), ("f4", 1), (">f8", 1)])
def test_whole_numbers_are_divided_by_the_largest_of_their_dtype(dtype, largest):
    found = as_floats(np.array([0, 1], dtype) * np.array(largest, dtype), np.float32)
    assert found.tolist() == [0, 1] and found.dtype == np.float32
