"""What files may hold: seeded changes of all files of a model, each of which loads, or is one clear error."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from spmd_engine.checkpoints.weights import Pretrained
from spmd_engine.errors import SpmdError

GOLDEN = Path(__file__).parents[1] / "golden"
VALUES = [None, True, -1, 0, 1, 3, 1 << 40, 1e308, -0.5, float("nan"), "", "x", [], [1], {}, {"a": 1}, [None, "x"]]


def is_refused(path):
    """Whether a model cannot be read: all of it is, or one clear error says why not."""
    try:
        found = Pretrained(path)
        for name in found:
            found[name][...]
        found.check_copies()
    except SpmdError as error:
        assert str(error).strip() and "\n" not in str(error)
        return True
    return False


def altered_bytes(content, rng):
    """Some bytes other ones, or fewer, or more."""
    content, kind = bytearray(content), rng.integers(4)
    at = int(rng.integers(min(len(content), 3000 if kind < 2 else len(content))))
    if kind == 0:
        content[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        content[at : at + 8] = rng.integers(0, 256, 8, np.uint8).tobytes()
    elif kind == 2:
        del content[at:]
    else:
        content[at:at] = b"\0" * int(rng.integers(1, 40))
    return bytes(content)


@pytest.mark.parametrize("name", ["llama.gguf", "qwen3moe.gguf", "gpt2.gguf"])
def test_altered_gguf_files(name, tmp_path):
    whole, path = (GOLDEN / "gguf" / name).read_bytes(), tmp_path / name
    refused = []
    for seed in range(40):
        path.write_bytes(altered_bytes(whole, np.random.default_rng(seed)))
        refused.append(is_refused(path))
    assert any(refused)


def test_altered_safetensors_files(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "decoders" / "mixtral", folder)
    whole = (folder / "model.safetensors").read_bytes()
    refused = []
    for seed in range(40):
        (folder / "model.safetensors").write_bytes(altered_bytes(whole, np.random.default_rng(seed)))
        refused.append(is_refused(folder))
    assert any(refused)


@pytest.mark.parametrize("family", ["gpt2", "llama", "phi3", "gemma3", "qwen2_yarn", "qwen3_moe"])
def test_any_value_of_any_field(family, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "decoders" / family, folder)
    content = json.loads((folder / "config.json").read_text())
    places = [(name,) for name in content] + [
        (name, inner) for name, each in content.items() if isinstance(each, dict) for inner in each
    ]
    rng, refused = np.random.default_rng(len(places)), []
    for place in places:
        altered = json.loads(json.dumps(content))
        inner = altered
        for name in place[:-1]:
            inner = inner[name]
        inner[place[-1]] = VALUES[int(rng.integers(len(VALUES)))]
        (folder / "config.json").write_text(json.dumps(altered))
        refused.append(is_refused(folder))
    assert any(refused)
