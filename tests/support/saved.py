"""The arrays of a run's newest checkpoint, and a manifest."""

from io import BytesIO

from spmd_engine.checkpoints import Checkpoint, Manifest


def parameters(folder):
    """The parameters, by name."""
    return {name: array[...] for name, array in Checkpoint(folder).items()}


def state(folder):
    """The optimizer state, by kind and name."""
    return {name: array[...] for name, array in Checkpoint(folder).section("optimizer").items()}


def everything(folder):
    """Bytes by name, equal if and only if the newest checkpoints of two runs have the same bits."""
    return {name: array.tobytes() for name, array in {**parameters(folder), **state(folder)}.items()}


def manifest(text):
    """The manifest in a text, which errors call "here"."""
    return Manifest.parse(BytesIO(text.encode()), "here")
