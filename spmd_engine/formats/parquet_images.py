"""Images in parquet files, as data sets of Hugging Face's hub have them. They need pyarrow and Pillow.

Images are decoded when they are needed, from row groups, of which a few are kept as they are in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.foreign import first_few, reading
from spmd_engine.formats.image_files import HELD_OUT, TRAIN, ImageKind, common_kind, notes_on, read_picture
from spmd_engine.importing import library
from spmd_engine.units import readable_bytes

MAGIC = b"PAR1"
_IMAGES, _CLASSES = ("image", "img", "picture", "pixels"), ("label", "labels", "fine_label", "class", "target")


KEPT = 1 << 28  #: bytes of images, as files have them, that an open reader keeps
_FEW = 8  # rows of a group that is read fast for one of them


@dataclass(frozen=True)
class ParquetRows:
    """Images[n h w c] in the rows of files, as plain values, like an ImageFiles.

    The groups of rows of all files follow each other: ``files`` has the file of each, ``groups`` its number there, and
    ``starts`` the number of its first row.
    """

    files: Sequence[str]
    groups: Sequence[int]
    starts: Sequence[int]
    column: str
    shape: tuple[int, ...]  #: n h w c
    pixels: str  #: their dtype

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the pixels."""
        return np.dtype(self.pixels)

    def open(self) -> OpenRows:
        """An object that is indexed by rows, as ``MappedArray.open`` returns it."""
        return OpenRows(self)


class OpenRows:
    """Images[n h w c] by numbers or slices of n. It keeps the row groups that it read last, ``KEPT`` bytes of them.

    Raises UsageError, naming file and row, for an image that is damaged or has changed its size.
    """

    def __init__(self, rows: ParquetRows) -> None:
        self.rows, self.shape, self.dtype = rows, rows.shape, rows.dtype
        self._starts = np.array(rows.starts)
        self._kept: dict[int, Any] = {}  # by group, the last one that was used at the end

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, numbers: slice | np.ndarray) -> np.ndarray:
        chosen = np.arange(len(self))[numbers] if isinstance(numbers, slice) else numbers
        _, height, width, channels = self.shape
        kind = ImageKind(height, width, channels, self.rows.pixels)
        pixels = np.empty((len(chosen), *self.shape[1:]), self.dtype)
        groups = np.searchsorted(self._starts, chosen, "right") - 1
        kept_first = sorted(np.unique(groups).tolist(), key=lambda group: group not in self._kept)
        for group in kept_first:
            images, file = self._read(group), self.rows.files[group]
            first = self._starts[self.rows.files.index(file)]
            for at in np.flatnonzero(groups == group):
                where = f"{file}, row {chosen[at] - first}"
                value = images[int(chosen[at] - self._starts[group])].as_py()
                pixels[at] = read_picture(BytesIO(_content(value, where)), where, kind)
        return pixels

    def _read(self, group: int) -> Any:
        """The column of images of a row group, an array of pyarrow."""
        images = self._kept.pop(group, None)
        if images is None:
            file = Path(self.rows.files[group])
            with _damaged(file):
                table = _open_parquet(file).read_row_group(self.rows.groups[group], [self.rows.column])
            images = table.column(0)
        self._kept[group] = images
        while len(self._kept) > 1 and sum(column.nbytes for column in self._kept.values()) > KEPT:
            del self._kept[next(iter(self._kept))]
        return images


@dataclass(frozen=True)
class ParquetImages:
    """Images[n h w c] and classes int64[n] of some files, by part, of which a second one is held out."""

    parts: Sequence[tuple[str, ParquetRows, np.ndarray]]  #: with the name of the first file
    names: Sequence[str]  #: names of the classes; none if the files have numbers only
    notes: Sequence[str]
    files: int


def parquet_files(folder: Path) -> list[Path]:
    """The parquet files of a folder, or of its subfolder ``data``."""
    return sorted(folder.glob("*.parquet")) or sorted(folder.glob("data/*.parquet"))


def is_of_images(file: Path) -> bool:
    """Whether a parquet file has columns of images and of classes."""
    with _damaged(file):
        return None not in _columns(_open_parquet(file))


def _damaged(file: Path) -> AbstractContextManager:
    return reading(f"{file} is damaged or cannot be read", ". Fetch it again")


def _open_parquet(file: Path) -> Any:
    parquet = library("pyarrow.parquet", f"{file}: parquet files need pyarrow", "data")
    return parquet.ParquetFile(file, page_checksum_verification=True)


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
    for part, tables in used.items():
        if not sum(len(table.classes) for table in tables):
            raise UsageError(f"{by_part[part][0]}: there are no rows in it")
    kind, animated = common_kind((BytesIO(content), where) for table in every for content, where in table.images())
    parts = []
    for tables in used.values():
        if len({table.image for table in tables}) > 1:
            raise UsageError(f"{tables[0].file}: the column of images has another name in a file beside it")
        y = np.concatenate([table.classes for table in tables])
        places = [(str(table.file.resolve()), *place) for table in tables for place in enumerate(table.sizes)]
        files_of, groups, sizes = zip(*places, strict=True)
        shape = (len(y), kind.height, kind.width, kind.channels)
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        rows = ParquetRows(files_of, groups, starts, tables[0].image, shape, kind.dtype)
        parts.append((str(tables[0].file), rows, y))
    first = every[0]
    unused = [file.name for part, some in by_part.items() if part not in used for file in some]
    notes = notes_on(first.unread, {"files of a part that is not used": unused} if unused else {}, animated)
    total, largest = sum(table.bytes for table in every), max(size for table in every for size in table.sizes)
    if total > KEPT and largest > _FEW:
        notes.append(
            f"{readable_bytes(total)} of images, of which {readable_bytes(KEPT)} are kept in memory: for most images "
            f"of a shuffled epoch, a row group of up to {largest:,} rows is read; write the files with "
            f"row_group_size={_FEW}"
        )
    return ParquetImages(parts, first.names, notes, len(every))


def _bytes_of(metadata: Any, column: str) -> int:
    """The size of a column, and of what is in it, when it is not compressed."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(metadata.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == column)


class _Table:
    """The columns of images and of classes of a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with _damaged(file):
            self._opened = _open_parquet(file)
            columns, metadata = self._opened.schema_arrow.names, self._opened.metadata
            image, label = _columns(self._opened)
            if image is None or label is None:
                raise UsageError(f"{file}: its columns are {first_few(columns, 12)}; call those of images image, label")
            self.image, self.unread = image, [name for name in columns if name not in (image, label)]
            self.sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
            self.bytes = _bytes_of(metadata, image)
            self.names = _class_names(self._opened.schema_arrow.metadata, label)
            classes = self._opened.read([label]).column(0).to_pylist()
        odd = next((row for row, value in enumerate(classes) if type(value) is not int), None)
        if odd is not None:
            raise UsageError(f"{file}, row {odd}: the class is {classes[odd]!r}; classes are whole numbers from 0")
        self.classes = np.array(classes, np.int64)

    def images(self) -> Iterator[tuple[bytes, str]]:
        """Yield the bytes of each row's image, and a name of the row for errors."""
        row = 0
        with _damaged(self.file):
            for batch in self._opened.iter_batches(256, columns=[self.image]):
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
