"""Checkpoints: each rank writes blocks of its shards; one commit completes the checkpoint; any mesh can load it."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.checkpoints.format.folder import CheckpointFolder, find_checkpoint
    from spmd_engine.checkpoints.format.manifest import Manifest
    from spmd_engine.checkpoints.pretrained import load_pretrained, open_pretrained
    from spmd_engine.checkpoints.read import Checkpoint, load_checkpoint
    from spmd_engine.checkpoints.save import Save, save_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointFolder",
    "Manifest",
    "Save",
    "find_checkpoint",
    "load_checkpoint",
    "load_pretrained",
    "open_pretrained",
    "save_checkpoint",
]

__getattr__ = imported_when_asked(__name__)
