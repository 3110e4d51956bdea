"""Images in files of their own, in folders or by a table of paths and classes. They need Pillow.

Each file is read, is counted as skipped with the reason, or is refused by name.
"""

from __future__ import annotations

import csv
import ctypes
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.errors import UsageError, one_of
from spmd_engine.foreign import first_few, read_text, reading, refuse_pointer
from spmd_engine.importing import library

#: Formats that are read. Pillow chooses by content, whatever the name says: others of its decoders start programs.
PICTURES = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
BACKGROUND = (255, 255, 255, 255)  #: white, behind what is transparent
#: Pillow's modes of bytes with one channel, and with several, which become red, green and blue.
_GREY, _COLOUR = {"1", "L", "LA", "La"}, {"P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"}
_TURNED = (5, 6, 7, 8)  # orientations of EXIF that exchange height and width
_ORIENTATION, _WHITE_IS_ZERO = 274, (262, 0)  # a tag of EXIF; a tag of TIFF and its value
_SIZE_OF_TIFF = 256, 257  # tags of width and height


# --- One image


@dataclass(frozen=True)
class ImageKind:
    """What the images of a data set have in common."""

    height: int
    width: int
    channels: int
    dtype: str  #: uint8, uint16 or float32


def _open_picture(source: Any) -> Any:
    """An image of Pillow, which reads its pixels later. Raises UsageError without Pillow, and Pillow's errors."""
    pillow = library("PIL.Image", "images in files need Pillow", "images")
    # Its warnings come beside our error, or where only what is not read is damaged.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        image = pillow.open(source, formats=PICTURES)
        if image.format == "TIFF":
            _silence_libtiff()
        return image
    except pillow.UnidentifiedImageError:
        if isinstance(source, str):
            refuse_pointer(source)
        raise


@cache
def _silence_libtiff() -> None:
    """Let Pillow's library for TIFF print no line of its own beside our error."""
    with suppress(OSError, AttributeError):  # a build of Pillow that has it otherwise
        ctypes.CDLL(import_module("PIL._imaging").__file__).TIFFSetErrorHandler(None)


def _dtype(image: Any) -> str:
    """The dtype of an image's pixels, whose largest number, or 1 in floats, is white. Raises ValueError."""
    if image.mode in _GREY | _COLOUR:
        return "uint8"
    if image.format == "TIFF" and image.tag_v2.get(_WHITE_IS_ZERO[0]) == _WHITE_IS_ZERO[1]:
        raise ValueError(f"white is 0 in its pixels of mode {image.mode}; save it with black as 0")
    if image.mode.startswith("I;16") or image.mode == "I" and image.format in ("PPM", "PNG"):  # at most 16 bits
        return "uint16"
    if image.mode == "F":
        return "float32"
    raise ValueError(f"its pixels are of mode {image.mode}, whose white is not known; save it with 8 or 16 bits")


def _upright_size(image: Any) -> tuple[int, int]:
    """Height and width as the orientation in EXIF says, without reading pixels."""
    exif = import_module("PIL.Image").Image.getexif(image)  # not a PNG's own method, which reads the pixels
    width, height = image.size
    if image.format == "TIFF":  # some versions of Pillow have turned the size already
        width, height = (image.tag_v2[tag] for tag in _SIZE_OF_TIFF)
    return (width, height) if exif.get(_ORIENTATION) in _TURNED else (height, width)


def _pixels(image: Any, kind: ImageKind) -> np.ndarray:
    """Pixels[h w c] of an image: upright, on the background, with the channels of the kind."""
    image.load()  # the EXIF of a PNG may follow its pixels
    is_upright = image.getexif().get(_ORIENTATION, 1) == 1
    upright = image if is_upright else import_module("PIL.ImageOps").exif_transpose(image)
    if upright.has_transparency_data:
        if kind.dtype != "uint8":
            raise ValueError(f"pixels of mode {image.mode} are transparent; save it without transparency")
        pillow = import_module("PIL.Image")
        ground = pillow.new("RGBA", upright.size, BACKGROUND)
        upright = pillow.alpha_composite(ground, upright.convert("RGBA"))
    if kind.dtype == "uint8":
        upright = upright.convert("L" if kind.channels == 1 else "RGB")
    return np.asarray(upright).astype(kind.dtype, copy=False).reshape(upright.height, upright.width, kind.channels)


def read_picture(source: Any, where: str, kind: ImageKind) -> np.ndarray:
    """Pixels[h w c] of the image in a file, or in an open one that errors call ``where``.

    Raises UsageError if it is damaged or of another kind.
    """
    hint = ". Replace or remove it"
    with reading(f"{where} is damaged or cannot be read", hint), _open_picture(source) as image:
        if sorted(image.size) != sorted((kind.height, kind.width)):  # before its pixels are read
            _check_size(where, (image.height, image.width), kind)
        _check_dtype(where, _dtype(image), kind)
        pixels = _pixels(image, kind)
    _check_size(where, pixels.shape[:2], kind)
    return pixels


def common_kind(pictures: Iterable[tuple[Any, str]]) -> tuple[ImageKind, list[str]]:
    """The kind of all images, and those that have several frames, of which the first is read.

    ``pictures`` are as the first arguments of ``read_picture``, at least one; only their beginnings are read. Images
    have one channel if all are grey. Raises UsageError for what is no image, and for images of several sizes or dtypes.
    """
    kind, is_grey, animated = None, True, []
    hint = f". Replace or remove it; formats: {', '.join(PICTURES)}"
    for source, where in pictures:
        with reading(f"{where} is no image in a format that is read", hint), _open_picture(source) as image:
            dtype, size = _dtype(image), _upright_size(image)
            is_grey &= image.mode not in _COLOUR
            if getattr(image, "is_animated", False) and image.format != "MPO":  # a JPEG of a phone, with previews
                animated.append(where)
        kind = kind or ImageKind(*size, 3, dtype)
        _check_size(where, size, kind)
        _check_dtype(where, dtype, kind)
    assert kind is not None
    return ImageKind(kind.height, kind.width, 1 if is_grey else 3, kind.dtype), animated


def _check_dtype(where: str, dtype: str, kind: ImageKind) -> None:
    if dtype != kind.dtype:
        raise UsageError(f"{where}: its pixels are {dtype}, but those before {kind.dtype}; save all alike")


def _check_size(where: str, size: Sequence[int], kind: ImageKind) -> None:
    if tuple(size) != (kind.height, kind.width):
        raise UsageError(
            f"{where}: {size[1]} x {size[0]} pixels, but those before have {kind.width} x {kind.height}. All must be "
            "of one size: scale or crop them first"
        )


@dataclass(frozen=True)
class ImageFiles:
    """Images[n h w c], one file for each. An index by numbers or a slice reads the files each time.

    It consists of plain values, like a MappedArray. Raises UsageError, naming the file, for an image that is damaged or
    has changed its size.
    """

    paths: Sequence[str]
    shape: tuple[int, ...]  #: n h w c
    pixels: str = "uint8"  #: their dtype

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the pixels."""
        return np.dtype(self.pixels)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, numbers: slice | np.ndarray) -> np.ndarray:
        chosen = np.arange(len(self))[numbers] if isinstance(numbers, slice) else numbers
        _, height, width, channels = self.shape
        kind = ImageKind(height, width, channels, self.pixels)
        rows = np.empty((len(chosen), height, width, channels), self.dtype)
        for row, number in zip(rows, chosen, strict=True):
            path = self.paths[int(number)]
            row[...] = read_picture(path, path, kind)
        return rows

    def open(self) -> ImageFiles:
        """An object that is indexed by rows, as ``MappedArray.open`` returns it."""
        return self


def pictures_at(path: Path, channels: int) -> tuple[ImageFiles, list[str]]:
    """The image in a file, or all images of a folder and its subfolders in the order of their paths, for a model of so
    many channels, and notes on what is not read. Raises UsageError as ``common_kind`` does."""
    listed = ListedImages(path)
    files = [*_files_in(path, listed)] if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path}: no images in it")
    kind, animated = common_kind((str(file), str(file)) for file in files)
    shape = (len(files), kind.height, kind.width, max(kind.channels, min(channels, 3)))
    return ImageFiles(tuple(map(str, files)), shape, kind.dtype), notes_on([], listed.skipped, animated)


# --- Data sets of images: their parts, the first of which is to learn from


TRAIN = ("train", "training")
HELD_OUT = ("val", "valid", "validation", "dev", "test", "testing")  #: the first of these that is present is held out
_OF_SYSTEMS = {"__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini"}
_DEEPEST = 32  # levels of folders in a class


@dataclass
class ListedImages:
    """Paths of images with the names of their classes, by part: "" to learn from, "held out" for validation."""

    where: Path
    parts: dict[str, list[tuple[Path, str]]] = field(default_factory=lambda: {"": []})
    skipped: dict[str, dict[str, None]] = field(default_factory=dict)  #: files that are not read, once, by the reason

    def skip(self, reason: str, path: Path) -> None:
        """Count a file, or all files of a folder, as skipped."""
        files = [inside for inside in path.rglob("*") if not inside.is_dir()] if path.is_dir() else [path]
        names = [file.relative_to(self.where) if file.is_relative_to(self.where) else file for file in files]
        if names:
            self.skipped.setdefault(reason, {}).update(dict.fromkeys(map(str, sorted(names))))

    def skip_if_of_system(self, path: Path) -> bool:
        """Whether a path is what operating systems leave in folders; if so, count it as skipped."""
        if is_of_system := _is_of_system(path):
            self.skip("left by an operating system", path)
        return is_of_system


@dataclass(frozen=True)
class LabelledImages:
    """Images and their classes, by part, the names of the classes, and notes on what is not read."""

    parts: Sequence[tuple[ImageFiles, np.ndarray]]  #: with classes int64[n]; a second part is held out
    names: Sequence[str]  #: names of the classes
    notes: Sequence[str]


def images_in_folder(folder: str | Path) -> LabelledImages:
    """The images of a folder. The names of the classes are those of its subfolders, or of subfolders of ``train``.

    Reads only the beginnings of files, for sizes and channels. Raises UsageError for a folder without such subfolders,
    for files in them that are no images, and for images of several sizes.
    """
    listed = ListedImages(folder := Path(folder))
    while True:
        inside = [path for path in sorted(folder.iterdir()) if not listed.skip_if_of_system(path)]
        folders, loose = [path for path in inside if path.is_dir()], [path for path in inside if not path.is_dir()]
        if len(folders) != 1 or loose or not any(map(Path.is_dir, folders[0].iterdir())):
            break
        folder = folders[0]  # as an archive unpacks
    if len(folders) < 2 and (table := _table_in(folder)):
        return images_in_table(table, listed)
    for path in loose:
        listed.skip("in no class's folder", path)
    by_name = {path.name.lower(): path for path in folders}
    parts = {by_name[name]: _list_in(by_name[name]) for name in (*TRAIN, *HELD_OUT) if name in by_name}
    train = next(iter(parts), None)
    if train is None or train.name.lower() not in TRAIN or len(parts) < len(folders) or parts[train] is None:
        _list_classes(folder, folders, listed, "")
        return _labelled(listed, sorted(path.name for path in folders), [])
    unread: list[str] = []
    for folder, images in parts.items():
        part = "" if folder == train else "held out"
        is_second = part and (folder.name.lower() in TRAIN or part in listed.parts)
        if images is None or is_second:
            listed.skip(f"in {folder.name}/, which is not used", folder)
        elif images != folder:
            unread += _list_table(images, listed, part)
        else:
            inside = [path for path in sorted(folder.iterdir()) if not listed.skip_if_of_system(path)]
            for path in inside:
                if not path.is_dir():
                    listed.skip("in no class's folder", path)
            _list_classes(folder, list(filter(Path.is_dir, inside)), listed, part)
    return _labelled(listed, _in_order({name for _, name in listed.parts[""]}, parts[train] != train), unread)


def _is_of_system(path: Path) -> bool:
    return path.name.startswith(".") or path.name.lower() in _OF_SYSTEMS


def _list_in(folder: Path) -> Path | None:
    """What lists the images of a part and their classes: the folder, if it has subfolders, or else its only table."""
    has_classes = any(path.is_dir() and not _is_of_system(path) for path in folder.iterdir())
    return folder if has_classes else _table_in(folder)


def _table_in(folder: Path) -> Path | None:
    """The only table in a folder, or None."""
    tables = [path for path in folder.iterdir() if is_table(path) and path.is_file() and not _is_of_system(path)]
    return tables[0] if len(tables) == 1 else None


def _in_order(names: Iterable[str], as_numbers: bool) -> list[str]:
    """Sort names of classes; ``as_numbers`` if all are whole numbers: names of folders are always texts."""
    return sorted(sorted(names), key=int if as_numbers and all(map(_WHOLE.fullmatch, names)) else None)


def _list_classes(folder: Path, classes: Sequence[Path], listed: ListedImages, part: str) -> None:
    """List the images of a folder's subfolders, one for each class."""
    images = listed.parts.setdefault(part, [])
    for path in classes:
        count = len(images)
        images += ((file, path.name) for file in _files_in(path, listed))
        if len(images) == count and not part:
            raise UsageError(f"{path}: a class without images. Add some, or remove the folder")
    if not images:
        raise UsageError(f"{folder}: no images in subfolders, one a class, as in {Path(folder, 'cats', '1.png')}")


def _files_in(folder: Path, listed: ListedImages, depth: int = 0) -> Iterator[Path]:
    if depth == _DEEPEST:
        raise UsageError(f"{folder}: more than {_DEEPEST} levels of folders. Does a link lead to a folder around it?")
    for path in sorted(folder.iterdir()):
        if listed.skip_if_of_system(path):
            continue
        if path.is_dir():
            yield from _files_in(path, listed, depth + 1)
        elif path.is_file():
            yield path
        else:
            listed.skip("neither a file nor a folder", path)


def _labelled(listed: ListedImages, names: Sequence[str], unread: Sequence[str]) -> LabelledImages:
    """Survey the listed images: their kind, and their classes as numbers, in the order of ``names``.

    ``unread`` are the columns of tables that are not read.
    """
    kind, animated = common_kind([(str(path), str(path)) for images in listed.parts.values() for path, _ in images])
    numbers, parts = {name: number for number, name in enumerate(names)}, []
    for images in listed.parts.values():
        for path, name in images:
            if name not in numbers:
                raise UsageError(f"{path}: of class {name!r}, of which none are to learn from; {one_of(name, names)}")
        labels = np.array([numbers[name] for _, name in images], np.int64)
        paths = tuple(str(path.resolve()) for path, _ in images)
        parts.append((ImageFiles(paths, (len(paths), kind.height, kind.width, kind.channels), kind.dtype), labels))
    return LabelledImages(parts, names, notes_on([*dict.fromkeys(unread)], listed.skipped, animated))


def notes_on(unread: Sequence[str], left_out: Mapping[str, Collection[str]], animated: Sequence[str]) -> list[str]:
    """What of a data set is not read: columns, files by the reason, and frames."""
    notes = [f"columns that are not read: {first_few(unread)}"] if unread else []
    notes += [f"{len(files):,} left out: {reason} ({first_few([*files])})" for reason, files in left_out.items()]
    if animated:
        notes.append(f"{len(animated):,} with several frames, of which the first is read ({first_few(animated)})")
    return notes


# --- A table of paths and classes

#: Names of columns; the first that is present is read.
_PATHS = ("path", "file", "file_name", "filename", "filepath", "file_path", "image", "image_path", "img", "img_path")
_CLASSES = ("label", "class", "category", "target", "y", "labels", "class_name", "label_name", "class_id")
_SPLITS = ("split", "subset", "part", "set")
_WHOLE = re.compile(r"-?\d+")


def is_table(path: Path) -> bool:
    """Whether a file is a table of text by its name."""
    return path.suffix.lower() in (".csv", ".tsv")


def images_in_table(file: str | Path, listed: ListedImages | None = None) -> LabelledImages:
    """The images whose paths, from the table's folder on, and classes are in a .csv or .tsv file.

    A column such as ``split`` divides them into parts. Raises UsageError as ``images_in_folder``, and, naming the line,
    for rows without a path or a class, and paths where there is no file.
    """
    file = Path(file)
    listed = listed or ListedImages(file.parent)
    unread = _list_table(file, listed)
    return _labelled(listed, _in_order({name for _, name in listed.parts[""]}, True), unread)


def _list_table(file: Path, listed: ListedImages, part: str | None = None) -> list[str]:
    """List the images of a table, in its parts or in the one that is given; returns the columns that are not read."""
    lines, unread = _table_lines(file)
    splits = {line.split for line in lines}
    held_out = next((name for name in HELD_OUT if name in splits), None)
    for line in lines:
        if part is not None or line.split in ("", *TRAIN):
            listed.parts.setdefault(part or "", []).append((line.path, line.name))
        elif line.split == held_out:
            listed.parts.setdefault("held out", []).append((line.path, line.name))
        elif line.split in HELD_OUT:
            listed.skip(f"of the part {line.split}, which is not used", line.path)
        else:
            raise UsageError(
                f"{line.where}: the part {line.split!r} is not known; {one_of(line.split, (*TRAIN, *HELD_OUT))}"
            )
    if not listed.parts[""]:
        raise UsageError(f"{file}: no images are to learn from; the column of parts must have {TRAIN[0]}, too")
    paths = {line.path for line in lines}
    for path in sorted({beside for folder in {path.parent for path in paths} for beside in folder.iterdir()} - paths):
        if not listed.skip_if_of_system(path) and path.is_file() and path != file:
            listed.skip("not in the table", path)
    return unread


def table_columns(line: str) -> list[int | None]:
    """The numbers of the columns of paths, classes and parts, by the names in a table's first line."""
    return _places(line.strip().split(_delimiter(line)))


def _delimiter(text: str) -> str:
    return max(",;\t", key=text.partition("\n")[0].count)


def _places(head: Sequence[str]) -> list[int | None]:
    cells = [name.strip(' "\r').lower() for name in head]
    return [next((cells.index(name) for name in names if name in cells), None) for names in (_PATHS, _CLASSES, _SPLITS)]


@dataclass(frozen=True)
class TableLine:
    """A line of a table of images."""

    where: str
    path: Path
    name: str  #: the name of the class
    split: str  #: the name of its part; "" without such a column


def _table_lines(file: Path) -> tuple[list[TableLine], list[str]]:
    """The lines of a table, and the names of columns that are not read."""
    with reading(f"{file} cannot be read as a table"):
        text = read_text(file)
        reader = csv.reader(StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    if len(rows) < 2:
        raise UsageError(f"{file}: the table has no rows")
    head, places = rows[0][1], _places(rows[0][1])
    if places[0] is None and len(head) == 2 and os.path.isfile(file.parent / head[0]):  # no line with names
        places, head = [0, 1, None], []
    elif None in places[:2]:
        raise UsageError(
            f"{file}: its columns are {first_few(head, 12)}; call that of the images' paths path, and that of their "
            "classes label"
        )
    lines, classes = [], {}
    for number, row in rows[bool(head) :]:
        path, name, split = ("" if place is None else row[place] if place < len(row) else "" for place in places)
        where = f"{file}, line {number}"
        if not path or not name:
            raise UsageError(f"{where}: there is no {'class' if path else 'path'}")
        if classes.setdefault(path, name) != name:
            raise UsageError(f"{where}: {path} is of class {name!r} here, but of {classes[path]!r} in a line before")
        with reading(f"{where}: the path cannot be used"):  # too long, or with a byte of zero
            if not (file.parent / path).is_file():
                raise UsageError(f"{where}: there is no file {file.parent / path}")
        lines.append(TableLine(where, file.parent / path, name, split.lower()))
    return lines, [name for place, name in enumerate(head) if place not in places]
