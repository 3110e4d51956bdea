"""GGUF files of many architectures, as llama.cpp's own converter writes them: logits, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

import tiny
from spmd_engine import Mesh, run
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.engine.composition import ModelConfig

FOLDER = Path(__file__).parents[1] / "golden" / "gguf_families"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.gguf"))
#: Of those whose files have 32 bits of what has more in the model: a magnitude, a scaled base, the divisors of pairs.
ROUNDED = {"phi3": 1e-6, "hunyuan-dense": 1e-6, "llama_short": 5e-5}


def logits_of(name, axes):
    expected = np.load(FOLDER / f"{name}.npz")

    def program():
        with Mesh(**axes) as mesh:
            engine, _ = open_pretrained(ModelConfig(str(FOLDER / f"{name}.gguf"), dtype="float64"), mesh)
            with engine.inference():
                y = engine.forward(expected["tokens"])
            return None if y is None else engine.join_outputs(y)

    found = [each for each in run(program, tiny.ranks_of(axes)) if each is not None]
    assert found
    return found, expected["logits"]


@pytest.mark.parametrize("axes", [{"model": 1}, {"model": 2}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_model_that_was_converted(name, axes):
    found, expected = logits_of(name, axes)
    for logits in found:
        np.testing.assert_allclose(logits[:, -8:], expected, rtol=0, atol=ROUNDED.get(name, 1e-10))
