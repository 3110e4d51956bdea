"""Images in files: each is read as people see it, counted as skipped with the reason, or refused by name."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from spmd_engine.errors import UsageError
from spmd_engine.formats.image_files import ImageKind, images_in_folder, images_in_table, pictures_at, read_picture
from support.labelled_images import LABELS, PIXELS, write_folder

# --- folders with a subfolder for each class


def read(folder):
    """The images of a folder without a held-out part, their classes, the classes' names, and notes."""
    found = images_in_folder(folder)
    ((files, labels),) = found.parts
    return files, labels, found.names, found.notes


@pytest.mark.parametrize("mode, channels", [("L", 1), ("1", 1), ("RGB", 3), ("RGBA", 3), ("P", 3)])
def test_a_folder_has_a_class_a_subfolder(tmp_path, mode, channels):
    files, labels, names, notes = read(write_folder(tmp_path, mode))
    assert not notes
    order = np.argsort(LABELS, kind="stable")
    assert names == ["class0", "class1", "class2"] and files.shape == (*PIXELS.shape, channels)
    np.testing.assert_array_equal(labels, LABELS[order])
    expected = np.where(PIXELS < 128, 0, 255) if mode == "1" else PIXELS
    if mode != "1":  # Pillow dithers
        for rows in (files[:], files[np.arange(len(files))]):
            np.testing.assert_array_equal(rows, np.repeat(expected[order][..., None], channels, axis=-1))
    np.testing.assert_array_equal(files[np.array([4, 1])], files[:][[4, 1]])


def test_pictures_of_several_sizes_are_refused_by_name(tmp_path):
    from PIL import Image

    write_folder(tmp_path)
    Image.new("L", (5, 7)).save(tmp_path / "class2" / "other.png")
    with pytest.raises(UsageError, match=r"class2/other.png: 5 x 7 pixels, but those before have 5 x 6.*scale or crop"):
        images_in_folder(tmp_path)


def test_what_is_no_picture_is_refused_by_name(tmp_path):
    write_folder(tmp_path)
    files, *_ = read(tmp_path)
    (tmp_path / "class1" / "01.png").write_bytes((tmp_path / "class1" / "01.png").read_bytes()[:60])
    with pytest.raises(UsageError, match=r"class1/01.png is damaged or cannot be read"):  # once it is wanted
        files[:]
    (tmp_path / "class1" / "notes.txt").write_text("to do")
    with pytest.raises(UsageError, match=r"class1/notes.txt is no image in a format that is read"):
        images_in_folder(tmp_path)


def test_pillow_chooses_no_decoder_beyond_the_formats_that_are_read(tmp_path, monkeypatch):
    """Pillow looks at the content, not the name: its decoder of EPS starts Ghostscript."""
    from PIL import EpsImagePlugin, Image

    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 6\n%%EndComments\n(x) print\n"
    folder, decoded = write_folder(tmp_path), []
    monkeypatch.setattr(EpsImagePlugin.EpsImageFile, "_open", lambda *_: decoded.append("opened"))
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: decoded.append("started"))
    files, *_ = read(folder)
    (folder / "class1" / "01.png").write_bytes(eps)
    hint = "Replace or remove it; formats: PNG, JPEG, GIF, BMP, TIFF, WEBP, PPM"
    with pytest.raises(UsageError, match=rf"^.*class1/01.png is no image in a format that is read: [^\n]*{hint}$"):
        images_in_folder(folder)
    with pytest.raises(UsageError, match=r"^.*class1/01.png is damaged or cannot be read: [^\n]*$"):  # put there later
        files[:]
    Image.new("L", (5, 6)).save(folder / "class1" / "01.png", "TGA")
    with pytest.raises(UsageError, match=r"class1/01.png is no image in a format that is read"):
        images_in_folder(folder)
    assert not decoded


def test_a_picture_that_grew_is_refused_before_its_pixels_are_read(tmp_path, monkeypatch):
    from PIL import Image

    files, *_ = read(write_folder(tmp_path))
    Image.new("L", (500, 600)).save(tmp_path / "class1" / "01.png")
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("its pixels are read"))
    with pytest.raises(UsageError, match=r"class1/01.png: 500 x 600 pixels, but those before have 5 x 6"):
        files[np.array([list(files.paths).index(str((tmp_path / "class1" / "01.png").resolve()))])]


def test_a_folder_needs_classes_with_pictures(tmp_path):
    with pytest.raises(UsageError, match="no images in subfolders, one a class"):
        images_in_folder(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "class10").mkdir()
    with pytest.raises(UsageError, match="class10: a class without images"):
        images_in_folder(tmp_path)


# --- one image


RGB = np.random.default_rng(1).integers(0, 256, (4, 6, 3), np.uint8)
SIDE = 274  # the tag of EXIF


def folder_of(tmp_path, *pictures):
    """A folder with a class for each picture, a pair of an image of Pillow, or bytes, and the name of its file."""
    for number, (picture, name) in enumerate(pictures):
        path = tmp_path / "pictures" / f"class{number}" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(picture) if isinstance(picture, bytes) else picture.save(path)
    return tmp_path / "pictures"


def read_one(tmp_path, picture, name="a.png"):
    files, *_ = read(folder_of(tmp_path, (picture, name)))
    assert files[:].dtype == files.dtype and files[:].shape == files.shape
    return files[:][0]


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_grey_of_16_bits_is_read_as_it_is(tmp_path, name):
    grey = np.random.default_rng(2).integers(0, 1 << 16, (4, 6)).astype(np.uint16)
    pgm = b"P5 6 4 65535\n" + grey.astype(">u2").tobytes()
    pixels = read_one(tmp_path, pgm if name == "a.pgm" else Image.fromarray(grey), name)
    assert pixels.dtype == np.uint16
    np.testing.assert_array_equal(pixels[..., 0], grey)


def test_floats_are_read_as_they_are(tmp_path):
    grey = np.random.default_rng(3).random((4, 6), np.float32)
    np.testing.assert_array_equal(read_one(tmp_path, Image.fromarray(grey), "a.tiff")[..., 0], grey)


def test_whole_numbers_of_32_bits_are_refused(tmp_path):
    folder = folder_of(tmp_path, (Image.fromarray(np.full((4, 6), 70_000, np.int32)), "a.tif"))
    with pytest.raises(UsageError, match=r"class0/a.tif is no image .*: its pixels are of mode I, whose white is not"):
        images_in_folder(folder)


def test_grey_of_16_bits_whose_white_is_0_is_refused(tmp_path):
    grey = Image.fromarray(np.full((4, 6), 7, np.uint16))
    folder = folder_of(tmp_path, (b"", "a.tif"))
    grey.save(folder / "class0" / "a.tif", tiffinfo={262: 0})
    with Image.open(folder / "class0" / "a.tif") as picture:
        if picture.tag_v2[262] != 0:
            pytest.skip("Pillow writes another value")
    with pytest.raises(UsageError, match="white is 0 in its pixels"):
        images_in_folder(folder)


def test_pixels_of_8_and_of_16_bits_do_not_mix(tmp_path):
    deep = Image.fromarray(np.full((4, 6), 700, np.uint16))
    folder = folder_of(tmp_path, (Image.new("L", (6, 4)), "a.png"), (deep, "b.png"))
    with pytest.raises(UsageError, match="class1/b.png: its pixels are uint16, but those before uint8; save all alike"):
        images_in_folder(folder)


def test_grey_and_colour_are_read_as_colour(tmp_path):
    files, *_ = read(folder_of(tmp_path, (Image.new("L", (6, 4), 9), "a.png"), (Image.fromarray(RGB), "b.png")))
    np.testing.assert_array_equal(files[:], [np.full((4, 6, 3), 9), RGB])


@pytest.mark.parametrize("side", range(1, 9))
@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif", "a.webp"])
def test_pictures_are_upright(tmp_path, side, name):
    """As viewers show them: the pixel that EXIF calls the first of the first row is."""
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:4, :8] = 255  # the first rows and columns of the file
    exif = Image.Exif()
    exif[SIDE] = side
    (folder := tmp_path / "pictures" / "class0").mkdir(parents=True)
    Image.fromarray(pixels).save(folder / name, exif=exif, **({"lossless": True} if name == "a.webp" else {}))
    files, *_ = read(tmp_path / "pictures")
    rows = np.flip(pixels, {1: (), 2: 1, 3: (0, 1), 4: 0, 5: (), 6: 0, 7: (0, 1), 8: 1}[side])
    expected = rows.transpose(1, 0, 2) if side > 4 else rows
    assert files.shape[1:3] == expected.shape[:2]
    np.testing.assert_array_equal(files[:][0] > 127, expected > 127)


def test_what_is_transparent_is_on_white(tmp_path):
    alpha = np.full((4, 6), 255, np.uint8)
    alpha[0], alpha[1] = 0, 51
    pixels = read_one(tmp_path, Image.fromarray(np.dstack([RGB, alpha])))
    np.testing.assert_array_equal(pixels[2:], RGB[2:])
    assert (pixels[0] == 255).all()
    np.testing.assert_allclose(pixels[1], RGB[1] * 0.2 + 255 * 0.8, atol=1)


def test_a_transparent_colour_of_a_palette_and_of_grey_is_on_white(tmp_path):
    for number, mode in enumerate(("P", "L")):
        (folder := tmp_path / mode / "class0").mkdir(parents=True)
        picture = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint8))
        if mode == "P":
            picture = picture.convert("P")
            picture.putpalette([9, 9, 9, 20, 30, 40])
        picture.save(folder / "a.png", transparency=0)
        pixels = read(tmp_path / mode)[0][:][0]
        other = [20, 30, 40] if mode == "P" else [1]
        assert pixels.tolist() == [[[255] * len(other), other], [other, [255] * len(other)]], number


def test_of_an_animation_the_first_frame_is_read_and_it_is_said(tmp_path):
    frames = [Image.fromarray(np.full((4, 6), value, np.uint8)) for value in (10, 200)]
    (folder := tmp_path / "class0").mkdir()
    for name in ("a.gif", "b.png", "c.tif"):
        frames[0].save(folder / name, save_all=True, append_images=frames[1:])
    files, _, _, notes = read(tmp_path)
    assert (files[:] == 10).all() and len(files) == 3
    names = ", ".join(str(folder / name) for name in ("a.gif", "b.png", "c.tif"))
    assert notes == [f"3 with several frames, of which the first is read ({names})"]


def test_the_library_for_tiff_prints_no_line_of_its_own(tmp_path, capfd):
    content = BytesIO()
    Image.new("L", (25, 24)).save(content, "TIFF", compression="tiff_lzw")
    damaged = bytearray(content.getvalue())
    damaged[8:60] = bytes(52)
    (tmp_path / "a.tif").write_bytes(damaged)
    with pytest.raises(UsageError, match=r"a\.tif is damaged or cannot be read"):
        read_picture(str(tmp_path / "a.tif"), "a.tif", ImageKind(24, 25, 1, "uint8"))
    assert capfd.readouterr().err == ""


def test_a_pointer_of_git_lfs_is_no_image(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12\n"
    with pytest.raises(UsageError, match="class0/a.png is a pointer of Git LFS, not the file itself"):
        images_in_folder(folder_of(tmp_path, (pointer, "a.png")))


# --- folders as people have them


def place(root, *names):
    """A grey picture at each of these paths: the number of the path is its only value."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (6, 4), 10 * number).save(root / name)
    return root


def values(part):
    files, labels = part
    return (files[:][:, 0, 0, 0] // 10).tolist(), labels.tolist()


def test_folders_inside_a_class_are_of_the_class(tmp_path):
    found = images_in_folder(place(tmp_path, "cats/a.png", "cats/more/still/b.png", "dogs/sub/c.png"))
    assert values(found.parts[0]) == ([0, 1, 2], [0, 0, 1]) and not found.notes


def test_what_is_not_read_is_counted_with_the_reason(tmp_path):
    place(tmp_path, "cats/a.png", "dogs/b.png", "c.png", "__MACOSX/cats/._a.png", "cats/.hidden/d.png")
    for name in ("Thumbs.db", "cats/Thumbs.db", "dogs/.DS_Store", "dogs/desktop.ini", "README.md"):
        (tmp_path / name).write_text("x")
    found = images_in_folder(tmp_path)
    assert values(found.parts[0]) == ([0, 1], [0, 1])
    assert found.notes == [
        "6 left out: left by an operating system (Thumbs.db, __MACOSX/cats/._a.png, cats/.hidden/d.png and 3 more)",
        "2 left out: in no class's folder (README.md, c.png)",
    ]


def test_parts_side_by_side_are_to_learn_from_and_held_out(tmp_path):
    place(tmp_path, "train/cats/a.png", "train/dogs/b.png", "val/dogs/c.png", "test/cats/d.png", "train/e.png")
    found = images_in_folder(tmp_path)
    assert [values(part) for part in found.parts] == [([0, 1], [0, 1]), ([2], [1])]
    assert found.names == ["cats", "dogs"]
    assert found.notes == [
        "1 left out: in no class's folder (train/e.png)",
        "1 left out: in test/, which is not used (test/cats/d.png)",
    ]


def test_a_test_part_without_classes_is_counted(tmp_path):
    found = images_in_folder(place(tmp_path, "train/cats/a.png", "train/dogs/b.png", "test/1.png"))
    assert len(found.parts) == 1 and found.notes == ["1 left out: in test/, which is not used (test/1.png)"]


def test_classes_that_are_called_train_and_test_are_classes(tmp_path):
    found = images_in_folder(place(tmp_path, "train/a.png", "test/b.png"))
    assert found.names == ["test", "train"] and len(found.parts) == 1


def test_a_folder_inside_which_an_archive_was_unpacked_is_the_folder(tmp_path):
    place(tmp_path, "flowers/train/cats/a.png", "flowers/train/dogs/b.png", "flowers/val/cats/c.png", "__MACOSX/x.png")
    found = images_in_folder(tmp_path)
    assert len(found.parts) == 2
    assert found.notes == ["1 left out: left by an operating system (__MACOSX/x.png)"]


def test_names_of_classes_are_texts_also_beside_a_table_that_is_not_read(tmp_path):
    place(tmp_path, "train/9/a.png", "train/10/b.png", "training/9/c.png", "val/9/d.png")
    (tmp_path / "train" / "notes.csv").write_text("a,b\n1,2\n")
    (tmp_path / "test").mkdir()
    found = images_in_folder(tmp_path)
    assert found.names == ["10", "9"] and values(found.parts[1]) == ([3], [1])
    assert found.notes == [
        "1 left out: in no class's folder (train/notes.csv)",
        "1 left out: in training/, which is not used (training/9/c.png)",
    ]


def test_a_folder_and_a_file_are_images_whatever_their_classes(tmp_path):
    place(tmp_path, "cats/a.png", "b.png", "cats/more/c.png")
    (tmp_path / "Thumbs.db").write_text("x")
    files, notes = pictures_at(tmp_path, channels=3)
    assert files[:][:, 0, 0, 0].tolist() == [10, 0, 20] and files.shape == (3, 4, 6, 3)
    assert notes == ["1 left out: left by an operating system (Thumbs.db)"]
    assert pictures_at(tmp_path / "b.png", channels=1)[0].shape == (1, 4, 6, 1)
    with pytest.raises(UsageError, match="Thumbs.db is no image"):
        pictures_at(tmp_path / "Thumbs.db", channels=1)


def test_a_held_out_class_that_is_not_learnt_is_refused(tmp_path):
    place(tmp_path, "train/cats/a.png", "train/dogs/b.png", "val/cows/c.png")
    with pytest.raises(UsageError, match="val/cows/c.png: of class 'cows', of which none are to learn from; "):
        images_in_folder(tmp_path)


def test_links_that_lead_around_are_refused(tmp_path):
    place(tmp_path, "cats/a.png", "dogs/b.png")
    (tmp_path / "cats" / "again").symlink_to(tmp_path / "cats", target_is_directory=True)
    with pytest.raises(UsageError, match="more than 32 levels of folders"):
        images_in_folder(tmp_path)


# --- tables


def table(tmp_path, text, name="labels.csv"):
    place(tmp_path, "a.png", "img/b.png", "img/c.png")
    (tmp_path / name).write_text(text)
    return tmp_path / name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("path,label\na.png,dog\nimg/b.png,cat\nimg/c.png,dog\n", "labels.csv"),
        ("\ufeffFile_Name;Class\r\na.png;dog\r\nimg/b.png;cat\r\nimg/c.png;dog\r\n", "labels.CSV"),
        ("label\timage\ndog\ta.png\n\ncat\timg/b.png\ndog\timg/c.png\n", "labels.tsv"),
        ("a.png,dog\nimg/b.png,cat\nimg/c.png,dog\n", "labels.csv"),
    ],
)
def test_a_table_has_paths_and_classes(tmp_path, text, name):
    found = images_in_table(table(tmp_path, text, name))
    assert found.names == ["cat", "dog"] and not found.notes
    assert values(found.parts[0]) == ([0, 1, 2], [1, 0, 1])


def test_a_folder_of_images_with_a_table_is_read_by_the_table(tmp_path):
    table(tmp_path, "path,label\na.png,10\nimg/b.png,9\n")
    found = images_in_folder(tmp_path)
    assert found.names == ["9", "10"] and values(found.parts[0]) == ([0, 1], [1, 0])
    assert found.notes == ["1 left out: not in the table (img/c.png)"]


def test_a_table_may_say_the_parts(tmp_path):
    text = "path,label,split,width\na.png,x,train,6\nimg/b.png,x,val,6\nimg/c.png,y,test,6\n"
    found = images_in_table(table(tmp_path, text))
    assert [values(part) for part in found.parts] == [([0], [0]), ([1], [0])]
    assert found.notes == [
        "columns that are not read: width", "1 left out: of the part test, which is not used (img/c.png)"
    ]  # fmt: skip


def test_each_part_may_have_a_table(tmp_path):
    """As in data sets of Hugging Face's hub that are folders of images."""
    place(tmp_path, "train/a.png", "train/b.png", "validation/c.png", "test/d.png", "train/e.png")
    for part, rows in {"train": "a.png,10,x\nb.png,9,x\n", "validation": "c.png,9,x\n"}.items():
        (tmp_path / part / "metadata.csv").write_text(f"file_name,label,note\n{rows}")
    (tmp_path / "train" / ".DS_Store").write_text("x")
    found = images_in_folder(tmp_path)
    assert [values(part) for part in found.parts] == [([0, 1], [1, 0]), ([2], [0])] and found.names == ["9", "10"]
    assert found.notes == [
        "columns that are not read: note",
        "1 left out: left by an operating system (train/.DS_Store)",
        "1 left out: not in the table (train/e.png)",
        "1 left out: in test/, which is not used (test/d.png)",
    ]


def test_nothing_is_counted_twice(tmp_path):
    file = table(tmp_path, "path,label\na.png,x\nimg/b.png,y\nimg/c.png,y\n")
    (tmp_path / ".DS_Store").write_text("x")
    assert images_in_folder(tmp_path).notes == ["1 left out: left by an operating system (.DS_Store)"]
    assert images_in_table(file).notes == ["1 left out: left by an operating system (.DS_Store)"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("path,label,split\na.png,x,val\n", "no images are to learn from; the column of parts must have train, too"),
        ("path,label\nb.png,x\n", "labels.csv, line 2: there is no file .*b.png"),
        (f"path,label\n{'b' * 300}.png,x\n", "labels.csv, line 2: the path cannot be used: File name too long"),
        ("path,label\na.png,x\nimg/b.png,\n", "line 3: there is no class"),
        ("path,label\na.png,x\n,y\n", "line 3: there is no path"),
        ("path,label\na.png,x\na.png,y\n", "line 3: a.png is of class 'y' here, but of 'x' in a line before"),
        ("name,kind\na.png,x\n", "its columns are name, kind; call that of the images' paths path"),
        ("path,label,split\na.png,x,late\n", "line 2: the part 'late' is not known"),
        ("path,label\n", "the table has no rows"),
        ('path,label\n"a.png,x\n', "cannot be read as a table: Error: unexpected end of data"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_the_line(tmp_path, text, said):
    with pytest.raises(UsageError, match=said) as caught:
        images_in_table(table(tmp_path, text))
    assert "\n" not in str(caught.value)
