"""Parquet files of images, as the library datasets writes them: read, or refused with the row."""

import json
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from spmd_engine import Mesh, run_threads
from spmd_engine.errors import UsageError
from spmd_engine.formats import parquet_images
from spmd_engine.training.data.images import find_images, load_images
from support.labelled_images import LABELS, PIXELS

pyarrow = pytest.importorskip("pyarrow")


def encoded(pixels):
    content = BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def write(file, rows, names=("cat", "dog", "owl"), plain=False, **others):
    """A file with the images and classes of these numbers."""
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    images = [encoded(PIXELS[row]) for row in rows]
    images = images if plain else [{"bytes": image, "path": f"{row}.png"} for row, image in zip(rows, images)]
    table = pyarrow.table({"image": images, "label": [int(LABELS[row]) for row in rows]} | others)
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if names else {}
    parquet.write_table(table.replace_schema_metadata(metadata), file)
    return file


def read(path):
    source = find_images(str(path))
    return source.x[:][..., 0], source


@pytest.mark.parametrize("plain", [False, True])
def test_images_and_classes_are_those_of_the_rows(tmp_path, plain):
    pixels, source = read(write(tmp_path / "any.parquet", range(len(PIXELS)), plain=plain))
    np.testing.assert_array_equal(pixels, PIXELS)
    np.testing.assert_array_equal(source.y, LABELS)
    assert source.names == ["cat", "dog", "owl"] and len(source.held_out) == 5 and not source.notes


def test_parts_are_those_of_the_files_names(tmp_path):
    write(tmp_path / "data" / "train-00000-of-00002.parquet", range(9), width=[6] * 9)
    write(tmp_path / "data" / "train-00001-of-00002.parquet", range(9, 15), width=[6] * 6)
    write(tmp_path / "data" / "validation-00000-of-00001.parquet", range(15, 20))
    write(tmp_path / "data" / "test-00000-of-00001.parquet", range(20, 23))
    pixels, source = read(tmp_path)
    np.testing.assert_array_equal(pixels, PIXELS[:20])
    assert source.held_out.tolist() == [15, 16, 17, 18, 19] and source.files == 3
    assert source.notes == [
        "columns that are not read: width",
        "1 left out: files of a part that is not used (test-00000-of-00001.parquet)",
    ]


def test_images_are_decoded_when_they_are_needed_from_a_few_row_groups(tmp_path, monkeypatch):
    from pyarrow import parquet

    file = write(tmp_path / "a.parquet", range(len(PIXELS)))
    parquet.write_table(parquet.read_table(file), file, row_group_size=5)
    read_groups, read_one = [], parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        parquet.ParquetFile,
        "read_row_group",
        lambda self, number, *more: read_groups.append(number) or read_one(self, number, *more),
    )
    images = find_images(str(file)).x
    assert not read_groups
    numbers = np.array([22, 0, 7, 21, 4])
    np.testing.assert_array_equal(images[numbers][..., 0], PIXELS[numbers])
    assert read_groups == [0, 1, 4]
    np.testing.assert_array_equal(images[3:9][..., 0], PIXELS[3:9])
    assert read_groups == [0, 1, 4]
    monkeypatch.setattr(parquet_images, "KEPT", 2 * images.parts[0]._read(0).nbytes + 99)
    images.parts[0]._kept.clear()
    read_groups.clear()
    for _ in range(3):  # those that are kept are used before another takes their place
        np.testing.assert_array_equal(images[:][..., 0], PIXELS)
        assert len(images.parts[0]._kept) == 2
    assert read_groups == [0, 1, 2, 3, 4, 0, 1, 2, 0, 3, 4]


def test_more_images_than_are_kept_in_large_row_groups_are_said(tmp_path, monkeypatch):
    file = write(tmp_path / "a.parquet", range(len(PIXELS)))
    monkeypatch.setattr(parquet_images, "KEPT", 1024)
    (note,) = find_images(str(file)).notes
    assert "of images, of which 1.00 KiB are kept in memory" in note and "up to 23 rows" in note
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file), file, row_group_size=8)
    assert not find_images(str(file)).notes


def test_every_rank_opens_the_files(tmp_path):
    file = write(tmp_path / "a.parquet", range(len(PIXELS)))

    def program():
        with Mesh(data=2) as mesh:
            images = load_images(mesh.group(), str(file))
            return images.x[np.array([20, 3])][..., 0], images.sha256

    (first, digest), (second, other) = run_threads(program, 2)
    np.testing.assert_array_equal(first, PIXELS[[20, 3]])
    np.testing.assert_array_equal(second, PIXELS[[20, 3]])
    assert digest == other


def test_a_file_without_rows_is_refused(tmp_path):
    with pytest.raises(UsageError, match="a.parquet: there are no rows in it"):
        read(write(tmp_path / "a.parquet", []))


def test_what_is_wrong_is_one_line_with_the_row(tmp_path):
    from pyarrow import parquet

    def refused(columns, said):
        parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
        with pytest.raises(UsageError, match=said) as caught:
            read(tmp_path / "x.parquet")
        assert "\n" not in str(caught.value)

    images = [encoded(pixels) for pixels in PIXELS[:3]]
    refused({"image": images}, "x.parquet: its columns are image; call those of images image, label")
    refused({"image": images, "label": [0, None, 1]}, "x.parquet, row 1: the class is None; classes are whole numbers")
    refused({"image": [*images[:2], None], "label": [0, 1, 2]}, "x.parquet, row 2: there is no image, as bytes")
    refused({"image": [*images[:2], b"GIF"], "label": [0, 1, 2]}, "x.parquet, row 2 is no image in a format that is")
    spoilt = images[1][:-30]
    refused({"image": [images[0], spoilt, images[2]], "label": [0, 1, 2]}, "row 1 is damaged or cannot be read")
    whole = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(whole[:-9])
    with pytest.raises(UsageError, match="x.parquet is damaged or cannot be read: "):
        read(tmp_path / "x.parquet")
