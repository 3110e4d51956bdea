"""The headers of a checkpoint's files: they must say of each block what the manifest says of it."""

from __future__ import annotations

from pathlib import Path

from spmd_engine.checkpoints.format.blocks import block_name
from spmd_engine.checkpoints.format.manifest import StoredArray, StoredBlock
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.safetensors_file import read_header

LARGEST = 1 << 30  #: bytes of a header, or a manifest

Said = dict[str, tuple[str, list[int], int]]  # of each block: dtype, shape, and where it begins in the file


class Headers:
    """Those of the files in a checkpoint's folder, of this step; each is read when it is first asked for."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step
        self._read: dict[str, Said] = {}

    def check(self, name: str, array: StoredArray, block: StoredBlock) -> None:
        """Raise CheckpointError unless the file says the same of a block: its array, dtype, place and step."""
        if block.file not in self._read:
            path = self._folder / block.file
            step, self._read[block.file] = read_file_header(path)
            if step != str(self._step):
                raise CheckpointError(f"{path} is damaged, or of another checkpoint: it says step {step!r:.40}")
        said = self._read[block.file].get(block_name(name, block.rectangle, array.shape))
        if said != (array.dtype, list(block.rectangle.shape), block.offset):
            raise CheckpointError(
                f"{self._folder / block.file}: its header and the manifest differ in {name}{block.rectangle}: one of "
                "them was altered"
            )


def read_file_header(path: Path) -> tuple[str, Said]:
    """Which step a safetensors file is of, and what it says of its blocks. Raises CheckpointError."""
    try:
        blocks, after, _ = read_header(path, LARGEST)
        facts = blocks.pop("__metadata__", {})
        return facts.get("step", ""), {
            name: (each["dtype"], each["shape"], after + each["data_offsets"][0]) for name, each in blocks.items()
        }
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: its header cannot be read ({error})") from error
