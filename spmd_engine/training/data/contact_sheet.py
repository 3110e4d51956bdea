"""A contact sheet: images of a data set as a model gets them, a row for each class, as a PNG. It needs Pillow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.foreign import reading
from spmd_engine.formats.array_files import npz_names
from spmd_engine.formats.image_files import is_table, table_columns
from spmd_engine.formats.parquet_images import MAGIC, is_of_images, parquet_files
from spmd_engine.importing import library
from spmd_engine.training.data.images import IDX_NAMES, NPZ_NAMES, ImageRows, Images, as_floats, find_images

CLASSES = 20  #: the most classes with a row
_ENDINGS = {".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm"}
_LOOKED_AT = 200  # files of a folder whose names show whether it holds images
_LONGEST_LINE = 1 << 16  # bytes of a table's line of names
_MARGIN, _LINE, _FONT = 4, 18, 13  # pixels


def holds_images(path: str | Path) -> bool:
    """Whether a file or folder is, by its names and columns, a data set of images with classes."""
    path = Path(path)
    if path.is_dir():
        if any(path.glob(IDX_NAMES[0][0])):
            return True
        if files := parquet_files(path):
            return is_of_images(files[0])
        names = [file for file, _ in zip(path.rglob("*.*"), range(_LOOKED_AT), strict=False) if file.is_file()]
        return 2 * sum(name.suffix.lower() in _ENDINGS for name in names) > len(names)
    if not path.is_file():  # a pipe is read once
        return False
    with reading(f"{path} cannot be read"), path.open("rb") as file:
        content = file.readline(_LONGEST_LINE)
    if is_table(path):
        return None not in table_columns(content.decode("utf-8-sig", errors="replace"))[:2]
    content = content[: len(MAGIC)]
    if content == MAGIC:
        return is_of_images(path)
    if content[:2] != b"PK":
        return False
    names = {*npz_names(path)}
    return any(names.issuperset(pairs[0]) for pairs in NPZ_NAMES)


def sheet_of(images: Images) -> bytes:
    """The contact sheet of a run's images."""
    return contact_sheet(images.x, images.y, images.held_out, images.names, images=8, side=64)


def contact_sheet(
    x: ImageRows, y: np.ndarray, held_out: np.ndarray, names: Sequence[str], images: int, side: int = 128
) -> bytes:
    """A PNG of the first images to learn from, at most so many, of each of the first classes, and the classes' names.

    Black is 0 and white is 1 of the floats that a model gets. Images with a longer side than ``side`` are scaled down,
    small ones to whole multiples. Raises UsageError without Pillow.
    """
    Image, ImageDraw, ImageFont = (
        library(f"PIL.{name}", "a contact sheet needs Pillow", "images") for name in ("Image", "ImageDraw", "ImageFont")
    )
    _, height, width, channels = x.shape
    scale = max(1, side // 2 // max(height, width)) if max(height, width) <= side else side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    learnt, font = np.setdiff1d(np.arange(len(y)), held_out), ImageFont.load_default(_FONT)
    rows = [learnt[y[learnt] == number] for number in range(min(int(y.max()) + 1, CLASSES))]
    labels = [
        f"{number} {names[number] if number < len(names) else ''} ({len(row):,} images)".replace("  ", " ")
        for number, row in enumerate(rows)
    ]
    across = max(images * (size[0] + _MARGIN), *(round(font.getlength(label)) + _MARGIN for label in labels))
    down = size[1] + _LINE + _MARGIN
    sheet = Image.new("RGB", (across + _MARGIN, len(rows) * down + _MARGIN), "#DDDDDD")
    for row, (numbers, label) in enumerate(zip(rows, labels, strict=True)):
        ImageDraw.Draw(sheet).text((_MARGIN, _MARGIN + row * down), label, fill="#000000", font=font)
        pixels = np.rint(as_floats(x[numbers[:images]], np.float32).clip(0, 1) * 255).astype(np.uint8)
        for column, image in enumerate(pixels):
            colours = Image.fromarray(np.repeat(image, 3, axis=2) if channels == 1 else image[..., :3].copy())
            resized = colours.resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX)
            sheet.paste(resized, (_MARGIN + column * (size[0] + _MARGIN), _MARGIN + row * down + _LINE))
    content = BytesIO()
    sheet.save(content, "PNG")
    return content.getvalue()


def show_images(path: str | Path, images: int) -> tuple[Mapping[str, Any], bytes]:
    """What a data set of images holds, for JSON, and its contact sheet, on this process alone.

    Raises UsageError as ``find_images`` does.
    """
    source = find_images(str(path))
    held_out = np.bincount(source.y[source.held_out], minlength=(count := int(source.y.max()) + 1))
    learnt = np.bincount(source.y, minlength=count) - held_out
    names = [*source.names, *([""] * (count - len(source.names)))]
    classes = [
        {"class": number, "name": names[number], "images": int(learnt[number]), "held_out": int(held_out[number])}
        for number in range(count)
    ]
    shape, dtype = list(source.x.shape[1:]), np.dtype(source.x.dtype).name
    facts = {"kind": "images", "path": str(path), "files": source.files, "shape": shape, "dtype": dtype}
    facts |= {"classes": classes, "notes": list(source.notes)}
    return facts, contact_sheet(source.x, source.y, source.held_out, source.names, images)


def as_lines(facts: Mapping[str, Any]) -> list[str]:
    """The facts of ``show_images`` as lines of text."""
    height, width, channels = facts["shape"]
    lines = [
        f"{facts['path']}: images of {height} x {width} x {channels}, {facts['dtype']}, {facts['files']:,} file(s)"
    ]
    for of_class in facts["classes"]:
        name = f" ({of_class['name']})" if of_class["name"] else ""
        count, held_out = of_class["images"], of_class["held_out"]
        lines.append(f"class {of_class['class']}{name}: {count:,} images, {held_out:,} more held out")
    return lines + list(facts["notes"])
