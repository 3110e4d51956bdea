"""What a run has saved, as arrays."""

from spmd_engine.checkpoints import Checkpoint


def parameters(folder):
    """Those of the newest checkpoint, by name."""
    return {name: array[...] for name, array in Checkpoint(folder).items()}


def state(folder):
    """The optimizer's, by kind and name."""
    return {name: array[...] for name, array in Checkpoint(folder).section("optimizer").items()}


def everything(folder):
    """Bytes by name: equal where the newest checkpoints of two runs are, to the bit."""
    return {name: array.tobytes() for name, array in {**parameters(folder), **state(folder)}.items()}
