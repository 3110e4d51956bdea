"""Where the loops of convolutions read and write, computed before they run: the tile, the panel, and places in it.

The panel is a copy of some images with their padding, or of some of their rows, which fits a cache. A patch, the inputs
of an output, consists of a few contiguous runs of it. A window is the tuple (size, stride, dilation, before).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from llvmlite import binding

Four = tuple[int, int, int, int]


def _tile() -> tuple[int, int]:
    """Rows and lanes: two vectors of this processor per row, and the rows that fit its registers beside factors."""
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 12, 16
    return (6, 8) if features.get("avx") else (12, 4)


ROWS, LANES = _tile()
WIDE = 2 * LANES  # columns of a tile
PANEL_ELEMENTS = 1 << 17  # the part of the images that is copied at a time: 512 KiB, so that they stay in the L2 cache


class Places(NamedTuple):
    """The places of a product whose left matrix is patches, or their transpose, which is read from the panel.

    Number (run t) of row m, t < length, is at reads[m] + runs[run] + t * step in the panel. The result of the row goes
    to writes[m], or, at a tile's edge, to a separate tile.
    """

    panel: Four  #: its shape
    lines: int  #: lines of outputs that are computed at a time
    reads: np.ndarray
    runs: np.ndarray
    length: int
    writes: np.ndarray
    in_tile: np.ndarray  #: where the rows of a tile begin


@lru_cache(maxsize=256)
def places_of_outputs(
    outputs: Four, strides: Four, inputs: int, groups: int, wide: int, rows: Four, columns: Four, limit: int
) -> Places:
    """Rows are patches, for y[b p q (g o)]. ``outputs`` are b, p, q, o; ``strides`` those of b, p, q in memory, and
    the offset of y; ``inputs`` is the number of channels of the images, ``wide`` that of columns of a tile, ``limit``
    that of elements of a panel."""
    panel, lines = _panel(outputs, inputs, rows, columns, limit)
    (samples, height, width, _), q = panel, outputs[2]
    reads = _grid((samples, height * width), (lines, rows[1] * width), (q, columns[1])) * inputs
    writes = _grid((samples, strides[0]), (lines, strides[1]), (q, strides[2])) + strides[3]
    runs, length = _runs_of_patch(panel, groups, rows, columns)
    return Places(panel, lines, _whole_tiles(reads), runs, length, writes, np.arange(ROWS) * wide)


@lru_cache(maxsize=256)
def places_of_taps(outputs: Four, inputs: int, groups: int, wide: int, rows: Four, columns: Four, limit: int) -> Places:
    """Rows are taps, for dw[g t (k l i) j], and all go to a separate tile. Runs are lines of outputs; as many of their
    columns as the tile has are held beside the panel."""
    panel, lines = _panel(outputs, inputs, rows, columns, limit, wide)
    samples, height, width, _ = panel
    taps, run_length = _runs_of_patch(panel, groups, rows, columns)
    reads = np.add.outer(taps, np.arange(run_length)).reshape(-1)
    runs = _grid((samples, height * width), (lines, rows[1] * width)) * inputs
    in_tile = np.arange(ROWS) * wide
    return Places(panel, lines, _whole_tiles(reads), runs, outputs[2], in_tile, in_tile)


def _panel(outputs: Four, inputs: int, rows: Four, columns: Four, limit: int, beside: int = 0) -> tuple[Four, int]:
    """The panel's shape [b h w c], and the lines of outputs that are computed from it. The panel and ``beside`` numbers
    per output are about ``limit`` numbers."""
    b, p, q, _ = outputs
    width = (q - 1) * columns[1] + (columns[0] - 1) * columns[2] + 1
    fitting = max(1, limit // max(1, rows[1] * width * inputs + q * beside))
    lines = min(p, fitting)
    return (min(b, max(1, fitting // p)), (lines - 1) * rows[1] + (rows[0] - 1) * rows[2] + 1, width, inputs), lines


def _runs_of_patch(panel: Four, groups: int, rows: Four, columns: Four) -> tuple[np.ndarray, int]:
    """The offsets of the runs of a patch, and their length: a run is a tap, or a row of adjacent taps."""
    _, _, width, inputs = panel
    if columns[2] == 1 and groups == 1:
        return _grid((rows[0], rows[2] * width * inputs)), columns[0] * inputs
    return _grid((rows[0], rows[2] * width * inputs), (columns[0], columns[2] * inputs)), inputs // groups


def _grid(*axes: tuple[int, int]) -> np.ndarray:
    """The sums of one multiple of each axis, (count, step); the last axis varies fastest."""
    places = np.zeros(1, np.int64)
    for count, step in axes:
        places = np.add.outer(places, np.arange(count) * step).reshape(-1)
    return places


def _whole_tiles(rows: np.ndarray) -> np.ndarray:
    """``rows`` with padding for the last tile; the results of the padding are discarded."""
    return np.concatenate([rows, np.zeros(ROWS, np.int64)])
