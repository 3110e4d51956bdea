"""Images in parquet files, as data sets of Hugging Face's hub have them. They need pyarrow and Pillow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.foreign import first_few, reading
from spmd_engine.formats.image_files import HELD_OUT, TRAIN, common_kind, notes_on, read_picture
from spmd_engine.importing import library

MAGIC = b"PAR1"
_IMAGES, _CLASSES = ("image", "img", "picture", "pixels"), ("label", "labels", "fine_label", "class", "target")


@dataclass(frozen=True)
class ParquetImages:
    """Images[n h w c] and classes int64[n] of some files, by part, of which a second one is held out."""

    parts: Sequence[tuple[str, np.ndarray, np.ndarray]]  #: with the name of the first file
    names: Sequence[str]  #: names of the classes; none if the files have numbers only
    notes: Sequence[str]
    files: int


def parquet_files(folder: Path) -> list[Path]:
    """The parquet files of a folder, or of its subfolder ``data``."""
    return sorted(folder.glob("*.parquet")) or sorted(folder.glob("data/*.parquet"))


def is_of_images(file: Path) -> bool:
    """Whether a parquet file has columns of images and of classes."""
    with reading(f"{file} is damaged or cannot be read", ". Fetch it again"):
        return None not in _columns(_open_parquet(file))


def _open_parquet(file: Path) -> Any:
    return library("pyarrow.parquet", f"{file}: parquet files need pyarrow", "data").ParquetFile(file)


def _columns(opened: Any) -> list[str | None]:
    """The names of the columns of images and of classes."""
    there = opened.schema_arrow.names
    return [next((name for name in names if name in there), None) for names in (_IMAGES, _CLASSES)]


def read_parquet_images(files: Sequence[Path]) -> ParquetImages:
    """The images of files whose names begin with those of their parts, as ``train-00000-of-00002.parquet``.

    A file of another name is to learn from. Raises UsageError, naming file and row, for rows that are no images, for
    images of several sizes, and without pyarrow.
    """
    by_part: dict[str, list[Path]] = {}
    for file in files:
        part = next((part for part in HELD_OUT if file.name.lower().startswith(part)), "")
        by_part.setdefault(part, []).append(file)
    held_out = next((part for part in HELD_OUT if part in by_part), None)
    if not by_part.get(""):
        raise UsageError(f"{files[0]}: there is no file to learn from beside it, such as {TRAIN[0]}.parquet")
    used = {part: [_Table(file) for file in by_part[part]] for part in ("", held_out) if part is not None}
    every = [table for tables in used.values() for table in tables]
    kind, animated = common_kind((BytesIO(content), where) for table in every for content, where in table.images())
    parts = []
    for tables in used.values():
        y = np.concatenate([table.classes for table in tables])
        x = np.empty((len(y), kind.height, kind.width, kind.channels), kind.dtype)
        images = (image for table in tables for image in table.images())
        for row, (content, where) in zip(x, images, strict=True):
            row[...] = read_picture(BytesIO(content), where, kind)
        parts.append((str(tables[0].file), x, y))
    first = every[0]
    unused = [file.name for part, some in by_part.items() if part not in used for file in some]
    notes = notes_on(first.unread, {"files of a part that is not used": unused} if unused else {}, animated)
    return ParquetImages(parts, first.names, notes, len(every))


class _Table:
    """The columns of images and of classes of a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with reading(f"{file} is damaged or cannot be read", ". Fetch it again"):
            self._opened = _open_parquet(file)
            columns = self._opened.schema_arrow.names
            self._image, label = _columns(self._opened)
            if self._image is None or label is None:
                raise UsageError(f"{file}: its columns are {first_few(columns, 12)}; call those of images image, label")
            self.unread = [name for name in columns if name not in (self._image, label)]
            self.names = _class_names(self._opened.schema_arrow.metadata, label)
            found = self._opened.read([label]).column(0).to_pylist()
        odd = next((row for row, value in enumerate(found) if type(value) is not int), None)
        if odd is not None:
            raise UsageError(f"{file}, row {odd}: the class is {found[odd]!r}; classes are whole numbers from 0")
        self.classes = np.array(found, np.int64)

    def images(self) -> Iterator[tuple[bytes, str]]:
        """Yield the bytes of each row's image, and a name of the row for errors."""
        row = 0
        with reading(f"{self.file} is damaged or cannot be read", ". Fetch it again"):
            batches = self._opened.iter_batches(256, columns=[self._image])
            for batch in batches:
                for value in batch.column(0).to_pylist():
                    yield _content(value, where := f"{self.file}, row {row}"), where
                    row += 1


def _content(value: Any, where: str) -> bytes:
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise UsageError(f"{where}: there is no image, as bytes of a PNG or JPEG file")
    return content


def _class_names(metadata: dict[bytes, bytes] | None, label: str) -> Sequence[str]:
    """The names of classes that the library ``datasets`` writes into its files."""
    features = json.loads((metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return features.get(label, {}).get("names") or ()
