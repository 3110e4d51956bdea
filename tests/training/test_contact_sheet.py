"""Contact sheets: the pixels that a model gets, in a row for each class; and what is a data set of images."""

from io import BytesIO

import numpy as np
from PIL import Image

from spmd_engine.training.data.contact_sheet import contact_sheet, holds_images, show_images
from spmd_engine.training.data.images import ImageRows
from support.labelled_images import LABELS, PIXELS, H, W, write_folder, write_idx, write_npz


def test_a_row_has_the_first_images_of_a_class_that_are_not_held_out():
    x, held_out = ImageRows([PIXELS]), np.array([0, 1])
    with Image.open(BytesIO(contact_sheet(x, LABELS, held_out, [], images=3))) as sheet:
        pixels = np.asarray(sheet)
    scale, found = 128 // 2 // H, []
    for label in range(3):
        numbers = np.flatnonzero(label == LABELS)
        for column, number in enumerate(numbers[numbers > 1][:3]):
            top, left = 4 + label * (H * scale + 22) + 18, 4 + column * (W * scale + 4)
            shown = pixels[top : top + H * scale : scale, left : left + W * scale : scale]
            np.testing.assert_array_equal(shown, np.repeat(PIXELS[number][..., None], 3, axis=2))
            found.append(number)
    assert len(found) == 9


def test_large_images_are_scaled_down_and_white_is_white(tmp_path):
    x = ImageRows([np.full((4, 400, 200), 65535, np.uint16)])
    with Image.open(BytesIO(contact_sheet(x, np.array([0, 0, 1, 1]), np.array([1]), ["a", "b"], images=1))) as sheet:
        pixels = np.asarray(sheet)
    assert (pixels[22 : 22 + 128, 4:68] == 255).all() and pixels.shape[0] == 2 * (128 + 22) + 4


def test_facts_have_all_that_is_there(tmp_path):
    facts, _ = show_images(write_idx(tmp_path, held_out=4), 2)
    assert facts["shape"] == [H, W, 1] and facts["dtype"] == "uint8" and facts["files"] == 4
    assert [each["images"] for each in facts["classes"]] == [7, 6, 6]
    assert [each["held_out"] for each in facts["classes"]] == [1, 2, 1]


def test_data_sets_of_images_are_told_from_texts(tmp_path):
    write_folder(tmp_path / "pictures"), write_idx(tmp_path / "idx")
    (tmp_path / "texts").mkdir()
    for name, text in {
        "a.md": "x",
        "b.txt": "y",
        "c.jsonl": "{}",
        "pictures.csv": "id,image,label\n1,a.png,2\n",
    }.items():
        (tmp_path / "texts" / name).write_text(text)
    Image.new("L", (4, 4)).save(tmp_path / "texts" / "logo.png")
    (tmp_path / "texts" / "reviews.csv").write_text("text,label\ngood,1\n")
    write_npz(tmp_path / "x.npz"), np.savez(tmp_path / "z.npz", z=PIXELS)
    found = ["pictures", "idx", "x.npz", "texts/pictures.csv"]
    assert all(holds_images(tmp_path / name) for name in found)
    for name in ("texts", "texts/a.md", "texts/c.jsonl", "texts/reviews.csv", "z.npz", "nowhere"):
        assert not holds_images(tmp_path / name)
