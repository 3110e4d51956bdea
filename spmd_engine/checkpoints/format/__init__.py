"""The files of a checkpoint: blocks, manifest, folder and lock."""
